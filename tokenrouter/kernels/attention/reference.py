"""Attention over token-granular slots: planned once per step, run once per layer (FlashInfer's plan and run).

T tokens, K visible entries of a request, H query heads, G key heads, D head size, S slots, P = 2 G (key heads, then
value heads). torch's ``scaled_dot_product_attention`` does the work.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenrouter.kernels.attention import sparse
from tokenrouter.kernels.attention.plan import Call, ReferencePlan, Span, plan, visible
from tokenrouter.kernels.values import Int8Entries

__all__ = ["ReferencePlan", "gather", "plan", "run"]


def run(
    q_THD: Tensor,
    kv_SPD: Tensor,
    plan: ReferencePlan,
    *,
    out: Tensor | None = None,
    received: Tensor | None = None,
    int8: Int8Entries | None = None,
) -> Tensor:
    """Attention of every query over its request's entries; arguments and errors as in ``KernelSet.attention``."""
    found = 0 if int8 is None else len(int8.q_SPD)
    if (len(kv_SPD), found) != (plan.num_full, plan.num_int8):
        raise ValueError(
            f"kv has another size than planned: the plan is for {plan.num_full} full entries and {plan.num_int8} in "
            f"int8, got {len(kv_SPD)} and {found}"
        )
    if received is not None:
        _observe(q_THD, kv_SPD, int8, plan, received)
    results = [_run_call(call, q_THD, kv_SPD, int8, plan.scale) for call in plan.calls]
    if plan.in_order and results and out is None:
        return (results[0] if len(results) == 1 else torch.cat(results)).flatten(1)
    out = q_THD.new_empty(q_THD.shape[0], q_THD.shape[1] * q_THD.shape[2]) if out is None else out
    out_THD = out.view(q_THD.shape)
    for call, result_NHD in zip(plan.calls, results, strict=True):
        if isinstance(call.rows, slice):
            out_THD[call.rows] = result_NHD
        else:
            out_THD.index_copy_(0, call.rows, result_NHD)
    for span in plan.spans:
        if plan.sparse and len(span.sparse_Q):
            q_QHD, entries_KPD = q_THD[span.query_index_Q], gather(kv_SPD, int8, span.slots_K)
            out_THD[span.query_index_Q] = sparse.attend(
                span, plan.sparse, q_QHD, entries_KPD, plan.scale
            )
    return out


def gather(kv_SPD: Tensor, int8: Int8Entries | None, slots_K: Tensor) -> Tensor:
    """The entries of ``slots_K`` (int64), full or int8, in ``kv_SPD``'s dtype: ``[K, P, D]``."""
    if int8 is None:
        return kv_SPD.index_select(0, slots_K)
    num_full = len(kv_SPD)
    entries_KPD = kv_SPD.index_select(0, slots_K.clamp_max(num_full - 1))
    at_K = (slots_K >= num_full).nonzero().flatten()
    slots_J = slots_K[at_K] - num_full
    values_JPD = int8.q_SPD[slots_J].float() * int8.scale_SP[slots_J].unsqueeze(-1)
    return entries_KPD.index_copy_(0, at_K, values_JPD.to(kv_SPD.dtype))


def _observe(
    q_THD: Tensor,
    kv_SPD: Tensor,
    int8: Int8Entries | None,
    plan: ReferencePlan,
    received: Tensor,
) -> None:
    """Softmax weights of each request's last queries, in float32, summed over them, mean over heads."""
    num_heads, groups, offset = q_THD.shape[1], kv_SPD.shape[1] // 2, 0
    for span in plan.spans:
        num_keys = span.slots_K.shape[0]
        first = span.query_index_Q.shape[0] - span.num_observed
        q_QHD = q_THD[span.query_index_Q[first:]].float()
        key_KGD = gather(kv_SPD, int8, span.slots_K)[:, :groups].float()
        key_KHD = key_KGD.repeat_interleave(num_heads // groups, 1)
        scores_HQK = torch.einsum("qhd,khd->hqk", q_QHD, key_KHD) * plan.scale
        mask = _mask(span, plan, q_THD, key_KGD)
        if mask is not None:
            scores_HQK.masked_fill_(~mask[..., first:, :], float("-inf"))
        weights_HQK = scores_HQK.softmax(-1).nan_to_num_(0.0)  # a query that sees nothing
        received[offset : offset + num_keys] += weights_HQK.sum(1).mean(0)
        offset += num_keys


def _mask(span: Span, plan: ReferencePlan, q_THD: Tensor, key_KGD: Tensor) -> Tensor | None:
    """Which entries the span's queries see, as scores ``[H, Q, K]`` take it; None: all."""
    if plan.sparse is None or not len(span.sparse_Q):
        return visible(span, plan.window)
    mask_GQK = sparse.seen(span, plan.sparse, q_THD[span.query_index_Q], key_KGD)
    return mask_GQK.repeat_interleave(q_THD.shape[1] // key_KGD.shape[1], 0)


def _run_call(
    call: Call, q_THD: Tensor, kv_SPD: Tensor, int8: Int8Entries | None, scale: float
) -> Tensor:
    """The result of one call, ``[B * Q, H, D]``. Views are made in one step each: a decode step makes thousands."""
    num_heads, head_dim = q_THD.shape[1:]
    planes = kv_SPD.shape[1]
    groups, width, batch = planes // 2, planes * head_dim, call.batch
    if isinstance(call.slots, slice):
        entries, first, num_keys = (
            kv_SPD,
            call.slots.start * width,
            call.slots.stop - call.slots.start,
        )
    else:
        entries, first, num_keys = (
            gather(kv_SPD, int8, call.slots),
            0,
            call.slots.shape[0] // batch,
        )
    first += entries.storage_offset()
    kv_shape, kv_stride = (
        (batch, groups, num_keys, head_dim),
        (num_keys * width, head_dim, width, 1),
    )
    q_NHD = q_THD[call.rows] if isinstance(call.rows, slice) else q_THD.index_select(0, call.rows)
    num_queries = q_NHD.shape[0] // batch
    row, head, _ = q_NHD.stride()
    result_BHQD = F.scaled_dot_product_attention(
        q_NHD.as_strided(
            (batch, num_heads, num_queries, head_dim), (num_queries * row, head, row, 1)
        ),
        entries.as_strided(kv_shape, kv_stride, first),
        entries.as_strided(kv_shape, kv_stride, first + groups * head_dim),
        attn_mask=call.bias,
        is_causal=call.causal,
        scale=scale,
        enable_gqa=num_heads != groups,
    )
    if num_queries == 1:
        return result_BHQD.squeeze(2)
    return result_BHQD.transpose(1, 2).flatten(0, 1)
