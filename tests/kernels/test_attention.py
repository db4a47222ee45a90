"""Guards attention over slots against a dense softmax, with NaN in every slot that is not a request's own.

T tokens, H query heads, G key heads, D head size, S slots, P planes, K keys of a request.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tokenrouter.kernels import AttentionPlan, KernelSet, select
from tokenrouter.types import AttentionSpan

NUM_HEADS, HEAD_DIM, SCALE = 4, 8, 0.3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request: it holds ``num_keys`` entries and asks with its last ``num_queries`` tokens.

    ``kept`` are the original positions of its entries when some were evicted.
    """

    num_keys: int
    num_queries: int = 1
    scattered: bool = False
    kept: tuple[int, ...] | None = None


def lay_out(
    cases: list[Case], num_kv_heads: int, *, seed: int = 0, spare: int = 13
) -> tuple[Tensor, Tensor, list[AttentionSpan]]:
    """Queries, an arena full of NaN but for the requests' slots and the null slot, and the spans."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(case.num_keys for case in cases) + spare
    free = torch.randperm(total, generator=generator).tolist()
    starts, at = [], spare // 2
    for case in cases:  # runs first, so that scattered requests take what is left between
        starts.append(at)
        at += 0 if case.scattered else case.num_keys
    taken = {
        slot
        for case, start in zip(cases, starts, strict=True)
        if not case.scattered
        for slot in range(start, start + case.num_keys)
    }
    rest = iter([slot for slot in free if slot not in taken])
    num_queries = sum(case.num_queries for case in cases)
    rows = torch.randperm(num_queries, generator=generator)
    kv_SPD = torch.full((total + 1, 2 * num_kv_heads, HEAD_DIM), float("nan"))
    kv_SPD[-1] = 0
    spans, offset = [], 0
    for case, start in zip(cases, starts, strict=True):
        slots = (
            torch.tensor([next(rest) for _ in range(case.num_keys)])
            if case.scattered
            else torch.arange(start, start + case.num_keys)
        )
        kv_SPD[slots] = torch.randn(case.num_keys, 2 * num_kv_heads, HEAD_DIM, generator=generator)
        last = case.kept[-1] if case.kept else case.num_keys - 1
        spans.append(
            AttentionSpan(
                query_index_Q=rows[offset : offset + case.num_queries],
                query_start=last + 1 - case.num_queries,
                slots_K=slots,
                key_positions_K=torch.tensor(case.kept) if case.kept else None,
                first_slot=-1 if case.scattered else start,
            )
        )
        offset += case.num_queries
    q_THD = torch.randn(num_queries, NUM_HEADS, HEAD_DIM, generator=generator)
    return q_THD, kv_SPD, spans


def dense(q_THD: Tensor, kv_SPD: Tensor, spans: list[AttentionSpan], window: int | None) -> Tensor:
    """Softmax over the visible keys, query by query, in double."""
    num_kv_heads = kv_SPD.shape[1] // 2
    out_THD = torch.full(q_THD.shape, float("nan"), dtype=torch.float64)
    for span in spans:
        positions_K = span.key_positions_K
        if positions_K is None:
            positions_K = torch.arange(len(span.slots_K))
        entries_KPD = kv_SPD[span.slots_K].double()
        repeat = NUM_HEADS // num_kv_heads
        keys_KHD = entries_KPD[:, :num_kv_heads].repeat_interleave(repeat, dim=1)
        values_KHD = entries_KPD[:, num_kv_heads:].repeat_interleave(repeat, dim=1)
        for offset, row in enumerate(span.query_index_Q.tolist()):
            query = span.query_start + offset
            seen_K = positions_K <= query
            if window is not None:
                seen_K &= positions_K > query - window
            scores_HK = torch.einsum("hd,khd->hk", q_THD[row].double(), keys_KHD[seen_K]) * SCALE
            out_THD[row] = torch.einsum("hk,khd->hd", scores_HK.softmax(-1), values_KHD[seen_K])
    return out_THD.flatten(1)


def make_plan(
    kernels: KernelSet, kv_SPD: Tensor, spans: list[AttentionSpan], window: int | None = None
) -> AttentionPlan:
    return kernels.plan_attention(
        spans, null_slot=kv_SPD.shape[0] - 1, scale=SCALE, dtype=kv_SPD.dtype, window=window
    )


def check(kernels: KernelSet, cases: list[Case], window: int | None, num_kv_heads: int = 2) -> None:
    q_THD, kv_SPD, spans = lay_out(cases, num_kv_heads)
    before_SPD = kv_SPD.clone()
    plan = make_plan(kernels, kv_SPD, spans, window)
    result_TA = kernels.attention(q_THD, kv_SPD, plan)
    assert result_TA.shape == (len(q_THD), NUM_HEADS * HEAD_DIM)
    assert_close(kv_SPD, before_SPD, rtol=0, atol=0, equal_nan=True)
    assert_close(result_TA.double(), dense(q_THD, kv_SPD, spans, window), rtol=1e-4, atol=1e-5)


every_window = pytest.mark.parametrize("window", [None, 1, 5, 64])


@every_window
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    ("num_keys", "num_queries"), [(1, 1), (2, 2), (40, 40), (40, 7), (41, 40), (230, 3), (450, 1)]
)
def test_one_request(
    kernels: KernelSet, num_keys: int, num_queries: int, scattered: bool, window: int | None
) -> None:
    """A whole prompt, a later chunk of one (its mask is not the square causal one), a decode token."""
    check(kernels, [Case(num_keys=num_keys, num_queries=num_queries, scattered=scattered)], window)


@every_window
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_a_mixed_step(kernels: KernelSet, num_kv_heads: int, window: int | None) -> None:
    """Prompts, chunks and decode tokens whose rows are interleaved by the sort by route."""
    cases = [
        Case(num_keys=33, num_queries=33),
        Case(num_keys=9),
        Case(num_keys=420),
        Case(num_keys=70, num_queries=20, scattered=True),
        Case(num_keys=1),
        Case(num_keys=205, scattered=True),
        Case(num_keys=17, scattered=True),
        Case(num_keys=64, num_queries=2),
    ]
    check(kernels, cases, window, num_kv_heads)


@every_window
@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [1, 1, 1],
        [1, 2, 3, 5, 7, 11, 13],
        [31, 33, 32, 97, 98, 99, 96],
        [383, 384, 385, 1, 700, 67],
        [500, 480, 20, 10],
        list(range(1, 40, 3)),
    ],
)
def test_decode_groups_of_odd_lengths(
    kernels: KernelSet, lengths: list[int], window: int | None
) -> None:
    """Padding of a group counts as a key, or a group's rows come back in another order."""
    cases = [Case(num_keys=n, scattered=i % 2 == 0) for i, n in enumerate(lengths)]
    check(kernels, cases, window)


@every_window
def test_evicted_entries(kernels: KernelSet, window: int | None) -> None:
    """Position taken for index: after an eviction the two differ."""
    kept = (0, 1, 5, 6, 20, 21, 22, 23)
    cases = [
        Case(num_keys=8, kept=kept),
        Case(num_keys=8, num_queries=3, kept=kept, scattered=True),
        Case(num_keys=12, scattered=True),
    ]
    check(kernels, cases, window)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kernels: KernelSet, dtype: torch.dtype) -> None:
    """Scores summed in half precision, or another dtype than the queries'."""
    q_THD, kv_SPD, spans = lay_out(
        [Case(num_keys=30, num_queries=30), Case(num_keys=50), Case(num_keys=9)], 2
    )
    q_THD, kv_SPD = q_THD.to(dtype), kv_SPD.to(dtype)
    plan = make_plan(kernels, kv_SPD, spans)
    result_TA = kernels.attention(q_THD, kv_SPD, plan)
    assert result_TA.dtype == dtype
    assert_close(result_TA.double(), dense(q_THD, kv_SPD, spans, None), rtol=0.02, atol=0.02)


def test_takes_queries_as_a_strided_view(kernels: KernelSet) -> None:
    """The queries are the first heads of the fused projection, not a tensor of their own."""
    q_THD, kv_SPD, spans = lay_out([Case(num_keys=12, num_queries=12), Case(num_keys=5)], 2)
    wide_THX = torch.full((len(q_THD), 2 * NUM_HEADS, HEAD_DIM), float("nan"))
    wide_THX[:, :NUM_HEADS] = q_THD
    plan = make_plan(kernels, kv_SPD, spans)
    result_TA = kernels.attention(wide_THX[:, :NUM_HEADS], kv_SPD, plan)
    assert torch.equal(result_TA, kernels.attention(q_THD, kv_SPD, plan))


cases_strategy = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 60), st.booleans()).map(
        lambda x: Case(num_keys=x[0], num_queries=1 if x[1] > 30 else min(x[:2]), scattered=x[2])
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=60, deadline=None)
@given(
    cases=cases_strategy,
    window=st.one_of(st.none(), st.integers(1, 70)),
    num_kv_heads=st.sampled_from([1, 2, 4]),
)
def test_any_step(cases: list[Case], window: int | None, num_kv_heads: int) -> None:
    """The combination nobody thought of."""
    check(select(), cases, window, num_kv_heads)
