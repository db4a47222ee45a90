"""Sparse rows in torch: masks over a request's entries, by mean keys that are found anew.

Q queries and K entries of a request, H query heads, G key heads, D head size, P planes, C blocks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenrouter.kernels.attention.plan import Span, visible
from tokenrouter.types import SparseAttention


def seen(span: Span, spec: SparseAttention, q_QHD: Tensor, key_KGD: Tensor) -> Tensor:
    """Which entries each query sees for each key head, bool ``[G, Q, K]``; queries that are not sparse see all before.

    Args:
        span: of the request.
        spec: of its sparse queries.
        q_QHD: its queries.
        key_KGD: its keys.
    """
    num_keys, groups, head_dim = key_KGD.shape
    positions_K = span.positions_K
    all_QK = visible(span, None)
    if all_QK is None:
        all_QK = q_QHD.new_ones(len(q_QHD), num_keys, dtype=torch.bool)
    seen_GQK = all_QK.repeat(groups, 1, 1)
    sum_QGD = q_QHD.float().unflatten(1, (groups, -1)).sum(2)
    block_K = positions_K // spec.block
    num_blocks = int(block_K[-1]) + 1 if num_keys else 0
    sum_CGD = sum_QGD.new_zeros(num_blocks, groups, head_dim)
    sum_CGD.index_add_(0, block_K, key_KGD.float())
    count_C = torch.bincount(block_K, minlength=num_blocks)
    mean_CGD = sum_CGD / count_C.clamp_min(1)[:, None, None]
    for query in span.sparse_Q.tolist():
        position = span.query_start + query
        start = spec.window_start(position)
        seen_K = (positions_K < spec.sinks) | (positions_K >= start)
        blocks_N = count_C[: start // spec.block].nonzero().flatten()
        scores_GN = torch.einsum("gd,ngd->gn", sum_QGD[query], mean_CGD[blocks_N])
        order_GN = scores_GN.nan_to_num(nan=-torch.inf).argsort(
            dim=-1, descending=True, stable=True
        )
        for group, best in enumerate(blocks_N[order_GN[:, : spec.top_blocks]]):
            seen_GQK[group, query] &= seen_K | torch.isin(block_K, best)
    return seen_GQK


def attend(
    span: Span, spec: SparseAttention, q_QHD: Tensor, entries_KPD: Tensor, scale: float
) -> Tensor:
    """Attention of a request's queries, ``[Q, H, D]``."""
    key_KGD, value_KGD = entries_KPD.chunk(2, dim=1)
    repeat = q_QHD.shape[1] // key_KGD.shape[1]
    mask_HQK = seen(span, spec, q_QHD, key_KGD).repeat_interleave(repeat, 0)
    result_HQD = F.scaled_dot_product_attention(
        q_QHD.transpose(0, 1)[None],
        key_KGD.transpose(0, 1)[None],
        value_KGD.transpose(0, 1)[None],
        attn_mask=mask_HQK,
        scale=scale,
        enable_gqa=repeat > 1,
    )[0]
    return result_HQD.transpose(0, 1)
