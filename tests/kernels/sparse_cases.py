"""Sparse attention in double, query by query: what sparse rows are tested against.

T tokens, H query heads, G key heads, D head size, K entries of a request, N of them that a query sees.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.testing import assert_close

from tests.kernels.attention_cases import SCALE, Step
from tokenrouter.kernels import AttentionPlan, KernelSet
from tokenrouter.types import BlockMeans, SparseAttention, SparseRows


def plan_sparse(
    kernels: KernelSet, step: Step, rows: SparseRows | None, observe_queries: int = 1
) -> AttentionPlan:
    """The step's plan; ``observe_queries`` of each request."""
    num_int8 = 0 if step.int8 is None else len(step.int8.q_SPD)
    return kernels.plan_attention(
        step.batch,
        num_slots=len(step.kv_SPD) + num_int8,
        num_int8=num_int8,
        num_heads=step.heads.num_heads,
        num_kv_heads=step.heads.num_kv_heads,
        head_dim=step.heads.head_dim,
        scale=SCALE,
        dtype=step.kv_SPD.dtype,
        num_observed_B=torch.full_like(step.batch.row_B, observe_queries),
        sparse=rows,
    )


def chosen_blocks(
    spec: SparseAttention, position: int, positions: Sequence[int], q_RD: Tensor, key_KD: Tensor
) -> list[int]:
    """Numbers of the blocks that one query sees of one key head, by a loop over blocks."""
    scores = []
    for block in range(spec.window_start(position) // spec.block):
        inside = [i for i, p in enumerate(positions) if p // spec.block == block]
        if inside:
            mean_D = key_KD[inside].double().mean(0)
            scores.append((-float((q_RD.double() @ mean_D).sum()), block))
    return [block for _, block in sorted(scores)[: spec.top_blocks]]


def dense_sparse(step: Step, rows: SparseRows, observe_queries: int) -> tuple[Tensor, Tensor]:
    """Outputs ``[T, H D]`` and attention received per entry, in double."""
    heads, batch, spec = step.heads, step.batch, rows.spec
    out_THD, all_received, at = step.q_THD.double() * float("nan"), [], 0
    repeat = heads.num_heads // heads.num_kv_heads
    for index, row in enumerate(batch.row_B.tolist()):
        num_keys, num_queries = int(batch.num_keys_B[index]), int(batch.num_queries_B[index])
        positions = list(range(num_keys))
        if batch.positions_RN is not None:
            positions = batch.positions_RN[row, :num_keys].tolist()
        key_KGD, value_KGD = step.entries(row, num_keys).double().chunk(2, dim=1)
        received_K = torch.zeros(num_keys, dtype=torch.float64)
        for offset, query_row in enumerate(batch.query_rows_T[at : at + num_queries].tolist()):
            query = int(batch.query_start_B[index]) + offset
            for group in range(heads.num_kv_heads):
                q_RD = step.q_THD[query_row, group * repeat : (group + 1) * repeat].double()
                seen = [i for i, p in enumerate(positions) if p <= query]
                if rows.is_sparse_T[query_row]:
                    best = chosen_blocks(spec, query, positions, q_RD, key_KGD[:, group])
                    start = spec.window_start(query)
                    seen = [
                        i
                        for i in seen
                        if positions[i] < spec.sinks
                        or positions[i] >= start
                        or positions[i] // spec.block in best
                    ]
                weights_RN = (q_RD @ key_KGD[seen, group].T * SCALE).softmax(-1)
                for r in range(repeat):
                    head = group * repeat + r
                    out_THD[query_row, head] = weights_RN[r] @ value_KGD[seen, group]
                if offset >= num_queries - observe_queries:
                    received_K[seen] += weights_RN.sum(0) / heads.num_heads
        all_received.append(received_K)
        at += num_queries
    return out_THD.flatten(1), torch.cat(all_received)


def means_for(step: Step, spec: SparseAttention) -> BlockMeans:
    """Room for the mean keys of the step's rows, none of them valid and all of them NaN."""
    num_rows, width = step.batch.slots_RN.shape
    longest = int(step.batch.query_start_B.max() + step.batch.num_queries_B.max()) + width
    shape = (num_rows, step.heads.num_kv_heads, step.heads.head_dim, longest // spec.block + 1)
    return BlockMeans(torch.full(shape, float("nan")), torch.zeros(num_rows, dtype=torch.int64))


def check_sparse(
    kernels: KernelSet, step: Step, rows: SparseRows, observe_queries: int = 1
) -> None:
    """Outputs and attention received equal the dense ones, with and without kept mean keys."""
    plan = plan_sparse(kernels, step, rows, observe_queries)
    expected_TA, expected = dense_sparse(step, rows, observe_queries)
    half = step.kv_SPD.dtype != torch.float32
    rtol, atol = (0.02, 0.02) if half else (1e-4, 2e-5)
    kept = means_for(step, rows.spec)
    assert kept.mean_RGDC.shape[3] >= plan.num_blocks
    for means in (None, kept, kept):
        before = torch.arange(plan.received_size) % 3 / 8
        received = before.clone()
        result_TA = kernels.attention(
            step.q_THD, step.kv_SPD, plan, received=received, int8=step.int8, means=means
        )
        plain_TA = kernels.attention(step.q_THD, step.kv_SPD, plan, int8=step.int8, means=means)
        assert_close(result_TA.double(), expected_TA, rtol=rtol, atol=atol)
        assert_close(plain_TA.double(), expected_TA, rtol=rtol, atol=atol)
        assert_close((received - before).double(), expected, rtol=rtol, atol=atol / 10)
