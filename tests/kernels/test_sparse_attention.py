"""Guards sparse attention against a dense softmax over the entries that its definition names, in every backend."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.kernels.attention_cases import Case, Heads, lay_out
from tests.kernels.conftest import Typed
from tests.kernels.sparse_cases import check_sparse, means_for, plan_sparse
from tokenrouter.kernels import KernelSet, NativeKernels, ReferenceKernels
from tokenrouter.types import AttentionBatch, SparseAttention, SparseRows

SPEC = SparseAttention(sinks=3, window=20, block=8, top_blocks=2)
GAPS = (*range(0, 90, 3), *range(120, 124), *range(200, 300))


def some_rows(num_tokens: int, spec: SparseAttention, share: float, seed: int = 0) -> SparseRows:
    generator = torch.Generator().manual_seed(seed)
    return SparseRows(spec, torch.rand(num_tokens, generator=generator) < share)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        SparseAttention(sinks=0, window=1, block=1, top_blocks=0),
        SparseAttention(sinks=40, window=7, block=32, top_blocks=1),
        SparseAttention(sinks=1, window=33, block=5, top_blocks=3),
        SparseAttention(sinks=0, window=16, block=16, top_blocks=0),
    ],
    ids=str,
)
def test_a_mixed_step(typed: Typed, spec: SparseAttention, share: float) -> None:
    """Sparse and full queries of one chunk, decode tokens of both kinds, evicted entries, requests too short to cut."""
    cases = [
        Case(num_keys=130, num_queries=130),
        Case(num_keys=260),
        Case(num_keys=90, num_queries=40, scattered=True),
        Case(num_keys=7),
        Case(num_keys=201, scattered=True),
        Case(num_keys=len(GAPS), num_queries=33, kept=GAPS, scattered=True),
        Case(num_keys=len(GAPS), kept=GAPS),
        Case(num_keys=70, num_queries=2),
    ]
    step = lay_out(cases, Heads(num_heads=6, num_kv_heads=2, head_dim=32)).to(typed.dtype)
    rows = some_rows(len(step.q_THD), spec, share)
    check_sparse(typed.kernels, step, rows, observe_queries=9)


@pytest.mark.parametrize(("num_heads", "head_dim"), [(2, 128), (8, 20), (6, 64), (80, 8)])
def test_head_sizes(typed: Typed, head_dim: int, num_heads: int) -> None:
    """Tails of vectors; queries whose heads fall into two blocks of rows, or into three."""
    cases = [Case(num_keys=150, num_queries=12), Case(num_keys=170), Case(num_keys=60)]
    step = lay_out(cases, Heads(num_heads=num_heads, num_kv_heads=2, head_dim=head_dim))
    check_sparse(typed.kernels, step.to(typed.dtype), some_rows(14, SPEC, 1.0), observe_queries=3)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_entries_in_int8(typed: Typed, share: float) -> None:
    """Mean keys of entries in int8 are those of the numbers that they stand for."""
    cases = [
        Case(num_keys=140, num_queries=33, scattered=True),
        Case(num_keys=200),
        Case(num_keys=129, scattered=True),
    ]
    step = lay_out(cases, Heads(num_heads=6, num_kv_heads=2, head_dim=32)).to(typed.dtype)
    rows = some_rows(35, SPEC, 0.8)
    check_sparse(typed.kernels, step.in_int8(share), rows, observe_queries=5)


@given(
    num_keys=st.integers(1, 90),
    num_queries=st.integers(1, 90),
    sinks=st.integers(0, 9),
    window=st.integers(1, 40),
    block=st.integers(1, 40),
    top_blocks=st.integers(0, 4),
    share=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 99),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_sizes(
    num_keys: int,
    num_queries: int,
    sinks: int,
    window: int,
    block: int,
    top_blocks: int,
    share: float,
    seed: int,
    native: NativeKernels,
) -> None:
    """Edges of blocks, windows and panels that no list of sizes names."""
    case = Case(num_keys=num_keys, num_queries=min(num_queries, num_keys), scattered=seed % 2 == 0)
    step = lay_out([case, Case(num_keys=50)], seed=seed)
    spec = SparseAttention(sinks=sinks, window=window, block=block, top_blocks=top_blocks)
    for kernels in (native, ReferenceKernels()):
        check_sparse(kernels, step, some_rows(len(step.q_THD), spec, share, seed), 4)


def test_an_early_query_sees_everything(kernels: KernelSet) -> None:
    """The last position that sees all, and the first that does not: off by one, quality or speed is lost in silence."""
    for length, differs in ((SPEC.first_limited, False), (SPEC.first_limited + 1, True)):
        step = lay_out([Case(num_keys=length)])
        sparse = plan_sparse(kernels, step, SparseRows(SPEC, torch.tensor([True])))
        full = plan_sparse(kernels, step, None)
        results = [kernels.attention(step.q_THD, step.kv_SPD, plan) for plan in (sparse, full)]
        assert torch.equal(*results) != differs


def test_chunks_do_not_matter(kernels: KernelSet) -> None:
    """A query chooses the same entries in a chunk of any size, and with means kept from chunk to chunk."""
    step = lay_out([Case(num_keys=120, num_queries=120)])
    rows = SparseRows(SPEC, torch.ones(120, dtype=torch.bool))
    whole_TA = kernels.attention(step.q_THD, step.kv_SPD, plan_sparse(kernels, step, rows))
    means, order = means_for(step, SPEC), step.batch.query_rows_T
    for start, stop in ((0, 50), (50, 51), (51, 119), (119, 120)):
        count = stop - start
        batch = AttentionBatch(
            query_rows_T=torch.arange(count),
            num_queries_B=torch.tensor([count]),
            query_start_B=torch.tensor([start]),
            row_B=step.batch.row_B,
            num_keys_B=torch.tensor([stop]),
            slots_RN=step.batch.slots_RN,
        )
        plan = kernels.plan_attention(
            batch,
            num_slots=len(step.kv_SPD),
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            scale=0.3,
            dtype=torch.float32,
            sparse=SparseRows(SPEC, torch.ones(count, dtype=torch.bool)),
        )
        part_TA = kernels.attention(step.q_THD[order[start:stop]], step.kv_SPD, plan, means=means)
        assert_close(part_TA, whole_TA[order[start:stop]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "wrong", [{"sinks": -1}, {"window": 0}, {"block": 0}, {"top_blocks": -1}, {"block": 1.5}]
)
def test_wrong_sizes_are_refused_by_name(wrong: dict[str, int]) -> None:
    """A block of 0 divided by zero in the kernel."""
    with pytest.raises(ValueError, match=f"sparse attention: {next(iter(wrong))}="):
        SparseAttention(**wrong)


def test_a_window_of_the_model_stays_alone(kernels: KernelSet) -> None:
    """Blocks outside of the model's own window were chosen."""
    step = lay_out([Case(num_keys=120)])
    with pytest.raises(ValueError, match="window of the model's own cannot be sparse"):
        kernels.plan_attention(
            step.batch,
            num_slots=len(step.kv_SPD),
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            scale=0.3,
            dtype=torch.float32,
            window=50,
            sparse=SparseRows(SPEC, torch.tensor([True])),
        )
