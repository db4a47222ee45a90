"""Attention over token-granular slots: planned once per step, run once per layer (FlashInfer's plan and run).

Q queries of one request, K its visible entries, B requests of a decode group, H query heads, G key heads, D head size,
S slots, P = 2 G (key heads, then value heads).

torch's ``scaled_dot_product_attention`` does the work. A request whose slots lie in a row is read in place. Other
requests are gathered; decode queries of similar length share one gather and one call, padded with the null slot, so
content of slots that are not the request's own is never read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenrouter.kernels.values import Int8Entries
from tokenrouter.types import AttentionBatch

GROUP_WASTE_KEYS = 400  # padding that costs as much as one more call
IN_PLACE_MIN_KEYS = 384  # from here on reading in place saves more than a call of its own costs


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    """One request's part of a forward.

    ``query_index_Q`` are its rows of the forward, ``slots_K`` its visible entries, ``key_positions_K`` their positions
    (None: 0 .. K-1), ``first_slot`` the first slot when they lie in a row, else -1, ``num_observed`` its last queries
    that report.
    """

    query_index_Q: Tensor
    query_start: int
    slots_K: Tensor
    key_positions_K: Tensor | None
    first_slot: int
    num_observed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """One ``scaled_dot_product_attention`` call: B requests with Q queries and K keys each.

    ``slots`` is an int64 tensor ``[B * K]`` or a slice of the arena; ``bias`` broadcasts to ``[B, 1, Q, K]``: 0 where a
    key is visible, -inf where not.
    """

    rows: Tensor | slice
    slots: Tensor | slice
    batch: int
    bias: Tensor | None
    causal: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferencePlan:
    """The calls that cover every query of a forward once; ``in_order`` when their rows follow each other from 0."""

    calls: tuple[_Call, ...]
    spans: tuple[_Span, ...]
    scale: float
    in_order: bool
    window: int | None

    @property
    def received_size(self) -> int:
        """Visible entries of all requests."""
        return sum(span.slots_K.shape[0] for span in self.spans)


def plan(
    batch: AttentionBatch,
    *,
    num_slots: int,
    scale: float,
    dtype: torch.dtype,
    window: int | None = None,
    num_observed_B: Tensor | None = None,
    num_int8: int = 0,
) -> ReferencePlan:
    """Groups the requests of ``batch`` into calls; arguments as in ``KernelSet.plan_attention``."""
    num_full = num_slots - num_int8
    spans = _spans(batch, num_observed_B, num_full)
    alone = [_runs_alone(span) for span in spans]
    calls = [_single(s, window, dtype) for s, single in zip(spans, alone, strict=True) if single]
    decode = [span for span, single in zip(spans, alone, strict=True) if not single]
    decode.sort(key=lambda span: -span.slots_K.shape[0])
    start, waste = 0, 0
    for end in range(1, len(decode) + 1):
        if end < len(decode):
            waste += decode[start].slots_K.shape[0] - decode[end].slots_K.shape[0]
        if end == len(decode) or waste > GROUP_WASTE_KEYS:
            calls.append(_decode_group(decode[start:end], num_full - 1, window, dtype))
            start, waste = end, 0
    calls.sort(key=lambda call: call.rows.start if isinstance(call.rows, slice) else -1)
    return ReferencePlan(
        calls=tuple(calls),
        spans=tuple(spans),
        scale=scale,
        in_order=_covers_in_order(calls),
        window=window,
    )


def _spans(batch: AttentionBatch, num_observed_B: Tensor | None, num_full: int) -> list[_Span]:
    spans, offset = [], 0
    observed_B = torch.zeros_like(batch.row_B) if num_observed_B is None else num_observed_B
    for queries, start, row, keys, observed in zip(
        batch.num_queries_B.tolist(),
        batch.query_start_B.tolist(),
        batch.row_B.tolist(),
        batch.num_keys_B.tolist(),
        observed_B.tolist(),
        strict=True,
    ):
        slots_K = batch.slots_RN[row, :keys]
        positions_RN = batch.positions_RN
        spans.append(
            _Span(
                query_index_Q=batch.query_rows_T[offset : offset + queries],
                query_start=start,
                slots_K=slots_K,
                key_positions_K=None if positions_RN is None else positions_RN[row, :keys],
                first_slot=_first_of_run(slots_K, num_full),
                num_observed=min(observed, queries),
            )
        )
        offset += queries
    return spans


def _first_of_run(slots_K: Tensor, num_full: int) -> int:
    """The first slot when they are consecutive and full, else -1."""
    if not len(slots_K):
        return -1
    first, last = int(slots_K[0]), int(slots_K[-1])
    in_a_row = last - first + 1 == len(slots_K) and bool((slots_K.diff() == 1).all())
    return first if in_a_row and last < num_full else -1


def _runs_alone(span: _Span) -> bool:
    """Prefill chunks, and long decode contexts that lie in a row."""
    long_run = span.first_slot >= 0 and span.slots_K.shape[0] >= IN_PLACE_MIN_KEYS
    return len(span.query_index_Q) > 1 or long_run


def _covers_in_order(calls: Sequence[_Call]) -> bool:
    """Whether the calls' rows are slices that follow each other (``plan`` has sorted them)."""
    end = 0
    for call in calls:
        if not isinstance(call.rows, slice) or call.rows.start != end:
            return False
        end = call.rows.stop
    return True


def _rows(index_Q: Tensor) -> Tensor | slice:
    first, last = int(index_Q[0]), int(index_Q[-1])
    consecutive = last - first + 1 == len(index_Q) and bool((index_Q.diff() == 1).all())
    return slice(first, last + 1) if consecutive else index_Q


def _single(span: _Span, window: int | None, dtype: torch.dtype) -> _Call:
    num_queries, num_keys = span.query_index_Q.shape[0], span.slots_K.shape[0]
    in_place = span.first_slot >= 0
    causal = num_queries == num_keys and span.query_start == 0 and window is None
    mask = None if causal else _mask(span, window)
    return _Call(
        rows=_rows(span.query_index_Q),
        slots=slice(span.first_slot, span.first_slot + num_keys) if in_place else span.slots_K,
        batch=1,
        bias=None if mask is None else _bias(mask, dtype),
        causal=causal,
    )


def _mask(span: _Span, window: int | None) -> Tensor | None:
    """Visible keys per query ``[Q, K]``, or None when every key is visible to every query."""
    num_queries, num_keys = span.query_index_Q.shape[0], span.slots_K.shape[0]
    if num_queries == 1 and (window is None or span.query_start < window):
        return None
    device = span.slots_K.device
    key_K = (
        torch.arange(num_keys, device=device)
        if span.key_positions_K is None
        else span.key_positions_K
    )
    query_Q1 = torch.arange(span.query_start, span.query_start + num_queries, device=device)[
        :, None
    ]
    mask = key_K <= query_Q1
    return mask if window is None else mask & (query_Q1 - key_K < window)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where ``mask`` is True, -inf where not: scores take it without a conversion per layer."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        ~mask, float("-inf")
    )


def _decode_group(
    group: Sequence[_Span], null_slot: int, window: int | None, dtype: torch.dtype
) -> _Call:
    lengths = [span.slots_K.shape[0] for span in group]
    slots_BK = torch.nn.utils.rnn.pad_sequence(
        [span.slots_K for span in group], batch_first=True, padding_value=float(null_slot)
    )
    masks = [_mask(span, window) for span in group]
    bias = None
    if min(lengths) < max(lengths) or any(mask is not None for mask in masks):
        device = slots_BK.device
        mask_BK = (
            torch.arange(max(lengths), device=device)
            < torch.tensor(lengths, device=device)[:, None]
        )
        for row, mask in enumerate(masks):
            if mask is not None:
                mask_BK[row, : lengths[row]] &= mask[0]
        bias = _bias(mask_BK[:, None, None, :], dtype)
    index_B = torch.cat([span.query_index_Q for span in group])
    return _Call(
        rows=_rows(index_B), slots=slots_BK.flatten(), batch=len(group), bias=bias, causal=False
    )


def run(
    q_THD: Tensor,
    kv_SPD: Tensor,
    plan: ReferencePlan,
    *,
    out: Tensor | None = None,
    received: Tensor | None = None,
    int8: Int8Entries | None = None,
) -> Tensor:
    """Attention of every query over its request's entries; arguments as in ``KernelSet.attention``."""
    if received is not None:
        _observe(q_THD, kv_SPD, int8, plan, received)
    results = [_run_call(call, q_THD, kv_SPD, int8, plan.scale) for call in plan.calls]
    if plan.in_order and out is None:
        return (results[0] if len(results) == 1 else torch.cat(results)).flatten(1)
    out = q_THD.new_empty(q_THD.shape[0], q_THD.shape[1] * q_THD.shape[2]) if out is None else out
    out_THD = out.view(q_THD.shape)
    for call, result_NHD in zip(plan.calls, results, strict=True):
        if isinstance(call.rows, slice):
            out_THD[call.rows] = result_NHD
        else:
            out_THD.index_copy_(0, call.rows, result_NHD)
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
        mask = _mask(span, plan.window)
        if mask is not None:
            scores_HQK.masked_fill_(~mask[first:], float("-inf"))
        weights_HQK = scores_HQK.softmax(-1).nan_to_num_(0.0)  # a query that sees nothing
        received[offset : offset + num_keys] += weights_HQK.sum(1).mean(0)
        offset += num_keys


def _run_call(
    call: _Call, q_THD: Tensor, kv_SPD: Tensor, int8: Int8Entries | None, scale: float
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
