"""Guards attention over slots against a dense softmax, with NaN in every slot that is not a request's own.

T tokens, H query heads, D head size.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.kernels.attention_cases import Case, Heads, check, dense, lay_out
from tests.kernels.conftest import Typed
from tokenrouter.kernels import KernelSet, NativeKernels, ReferenceKernels, select

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
    case = Case(num_keys=num_keys, num_queries=num_queries, scattered=scattered)
    check(kernels, lay_out([case]), window)


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
    check(kernels, lay_out(cases, Heads(num_kv_heads=num_kv_heads)), window, observe_queries=9)


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
        [255, 256, 257, 511, 512, 513],
        list(range(1, 40, 3)),
    ],
)
def test_decode_groups_of_odd_lengths(
    kernels: KernelSet, lengths: list[int], window: int | None
) -> None:
    """Padding of a group counts as a key, or a group's rows come back in another order."""
    cases = [Case(num_keys=n, scattered=i % 2 == 0) for i, n in enumerate(lengths)]
    check(kernels, lay_out(cases), window)


@every_window
def test_evicted_entries(kernels: KernelSet, window: int | None) -> None:
    """Position taken for index: after an eviction the two differ."""
    kept = (0, 1, 5, 6, 20, 21, 22, 23)
    gaps = (*range(0, 90, 3), *range(200, 340))  # queries are the last entries, windows cut between
    cases = [
        Case(num_keys=8, kept=kept),
        Case(num_keys=8, num_queries=3, kept=kept, scattered=True),
        Case(num_keys=12, scattered=True),
        Case(num_keys=len(gaps), num_queries=40, kept=gaps, scattered=True),
        Case(num_keys=len(gaps), kept=gaps),
    ]
    check(kernels, lay_out(cases), window, observe_queries=2)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("head_dim", [20, 32, 64, 128])
@pytest.mark.parametrize("window", [None, 50])
def test_entries_in_int8(typed: Typed, share: float, head_dim: int, window: int | None) -> None:
    """Full and int8 entries of one request: a scale of another plane or slot, a slot counted from the wrong end."""
    cases = [
        Case(num_keys=70, num_queries=33, scattered=True),
        Case(num_keys=400),
        Case(num_keys=129, scattered=True),
        Case(num_keys=9, num_queries=9),
        Case(num_keys=1),
    ]
    heads = Heads(num_heads=6, num_kv_heads=2, head_dim=head_dim)
    step = lay_out(cases, heads).to(typed.dtype).in_int8(share)
    check(typed.kernels, step, window, observe_queries=5, tolerance=2e-5)


def test_each_request_has_its_own_observed_queries(typed: Typed) -> None:
    """Requests that are not asked, reported; the count of a neighbour taken; a plan that observes nothing, adding."""
    cases = [Case(num_keys=70, num_queries=33), Case(num_keys=200), Case(num_keys=150)]
    cases.append(Case(num_keys=40, num_queries=40))
    step = lay_out(cases, Heads(num_heads=6, num_kv_heads=2, head_dim=32)).to(typed.dtype)
    counts = [9, 0, 1, 0]
    plan = step.plan_observing(typed.kernels, torch.tensor(counts))
    received = torch.zeros(plan.received_size)
    typed.kernels.attention(step.q_THD, step.kv_SPD, plan, received=received)
    for part, count in zip(received.split([70, 200, 150, 40]), counts, strict=True):
        assert_close(part.sum(), torch.tensor(float(count)), rtol=1e-2, atol=0)
    dense_9 = dense(step, None, 9)[1][:70]
    assert_close(received[:70].double(), dense_9, rtol=0.02, atol=2e-3)
    before = received.clone()
    nothing = step.plan_observing(typed.kernels, None)
    typed.kernels.attention(step.q_THD, step.kv_SPD, nothing, received=received)
    assert torch.equal(received, before)


@pytest.mark.parametrize("observe_queries", [0, 1, 2, 16, 33, 500])
@pytest.mark.parametrize("window", [None, 20])
def test_attention_received(typed: Typed, window: int | None, observe_queries: int) -> None:
    """The wrong queries of a chunk, a head counted twice, decode ranges put together without their weights."""
    cases = [
        Case(num_keys=70, num_queries=33, scattered=True),
        Case(num_keys=600),
        Case(num_keys=2, num_queries=2),
        Case(num_keys=300, num_queries=17),
    ]
    step = lay_out(cases, Heads(num_heads=6, num_kv_heads=2, head_dim=16)).to(typed.dtype)
    assert step.plan(typed.kernels, window, observe_queries).received_size == 70 + 600 + 2 + 300
    check(typed.kernels, step, window, observe_queries)


@pytest.mark.parametrize(
    "heads",
    [
        Heads(num_heads=9, num_kv_heads=3, head_dim=64),
        Heads(num_heads=16, num_kv_heads=2, head_dim=128),
        Heads(num_heads=3, num_kv_heads=3, head_dim=20),
        Heads(num_heads=5, num_kv_heads=1, head_dim=8),
        Heads(num_heads=6, num_kv_heads=3, head_dim=80),
        Heads(num_heads=2, num_kv_heads=2, head_dim=96),
        Heads(num_heads=8, num_kv_heads=1, head_dim=32),
        Heads(num_heads=4, num_kv_heads=1, head_dim=256),
        Heads(num_heads=3, num_kv_heads=1, head_dim=2),
    ],
    ids=lambda h: f"{h.num_heads}x{h.num_kv_heads}x{h.head_dim}",
)
@pytest.mark.parametrize("window", [None, 40])
def test_every_head_size_and_ratio(typed: Typed, heads: Heads, window: int | None) -> None:
    """A head that is no multiple of a vector, more heads in a group than a block has rows, one head for all."""
    cases = [
        Case(num_keys=75, num_queries=23, scattered=True),
        Case(num_keys=301, scattered=True),
        Case(num_keys=34, num_queries=34),
        Case(num_keys=1),
    ]
    check(typed.kernels, lay_out(cases, heads).to(typed.dtype), window, observe_queries=5)


def test_a_long_context(typed: Typed) -> None:
    """Sums over many ranges and blocks, rescaled again and again."""
    cases = [Case(num_keys=1100, num_queries=40, scattered=True), Case(num_keys=1777)]
    heads = Heads(num_heads=3, num_kv_heads=1, head_dim=64)
    check(typed.kernels, lay_out(cases, heads).to(typed.dtype), observe_queries=3)


def test_large_scores(typed: Typed) -> None:
    """exp of a score that is not lowered by the largest one; a largest one of padding."""
    step = lay_out([Case(num_keys=90, num_queries=35), Case(num_keys=300, scattered=True)])
    for factor in (-300.0, 300.0):
        step.q_THD.mul_(factor).clamp_(-800, 800)
        expected_TA, _ = dense(step.to(typed.dtype), None)
        plan = step.to(typed.dtype).plan(typed.kernels)
        got_TA = typed.kernels.attention(
            step.q_THD.to(typed.dtype), step.kv_SPD.to(typed.dtype), plan
        )
        torch.testing.assert_close(got_TA.double(), expected_TA, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("num_queries", [1, 3])
def test_a_query_that_sees_nothing(kernels: KernelSet, num_queries: int) -> None:
    """All of a request's entries have left the window: 0/0, or the softmax of what may not be seen."""
    away = Case(num_keys=9, num_queries=num_queries, gap=100)
    for dtype in (torch.float32, torch.bfloat16):
        step = lay_out([Case(num_keys=5), away, Case(num_keys=40, num_queries=7)]).to(dtype)
        plan = step.plan(kernels, window=5)
        received = torch.zeros(plan.received_size)
        result_TA = kernels.attention(step.q_THD, step.kv_SPD, plan, received=received)
        rows = step.batch.query_rows_T[1 : 1 + num_queries]
        assert not result_TA[rows].any() and result_TA.isfinite().all()
        assert not received[5:14].any() and received.isfinite().all()


def test_no_entries_at_all(kernels: KernelSet) -> None:
    """num_keys 0, a request whose every entry is gone."""
    step = lay_out([Case(num_keys=6), Case(num_keys=4)])
    step.batch.num_keys_B[1] = 0
    plan = step.plan(kernels)
    received = torch.zeros(plan.received_size)
    result_TA = kernels.attention(step.q_THD, step.kv_SPD, plan, received=received)
    row = int(step.batch.query_rows_T[1])
    assert not result_TA[row].any() and result_TA[1 - row].any()
    assert received.shape == (6,) and abs(float(received.sum()) - 1) < 1e-5


def test_no_requests(level: NativeKernels) -> None:
    """A forward without tokens."""
    step = lay_out([Case(num_keys=3)])
    none = torch.empty(0, dtype=torch.int64)
    for name in ("query_rows_T", "num_queries_B", "query_start_B", "row_B", "num_keys_B"):
        object.__setattr__(step.batch, name, none)
    plan = step.plan(level)
    out_TA = torch.empty(0, 32)
    assert level.attention(step.q_THD[:0], step.kv_SPD, plan, out=out_TA) is out_TA
    assert plan.received_size == 0


def test_half_precision_of_the_reference() -> None:
    """Scores summed in half precision, or another dtype than the queries'."""
    cases = [Case(num_keys=30, num_queries=30), Case(num_keys=50), Case(num_keys=9)]
    check(ReferenceKernels(), lay_out(cases).to(torch.float16))


def test_takes_queries_as_a_strided_view(typed: Typed) -> None:
    """The queries are the first heads of the fused projection, not a tensor of their own."""
    kernels, dtype = typed
    step = lay_out([Case(num_keys=12, num_queries=12), Case(num_keys=5)]).to(dtype)
    wide_THX = torch.full((len(step.q_THD), 8, 8), float("nan"), dtype=dtype)
    wide_THX[:, :4] = step.q_THD
    plan = step.plan(kernels)
    result_TA = kernels.attention(wide_THX[:, :4], step.kv_SPD, plan)
    assert torch.equal(result_TA, kernels.attention(step.q_THD, step.kv_SPD, plan))


def test_company_and_threads_change_no_bit(level: NativeKernels) -> None:
    """Ranges or blocks that depend on the batch or on the number of threads: greedy outputs then differ."""
    cases = [
        Case(num_keys=600, scattered=True),
        Case(num_keys=90, num_queries=50, scattered=True),
        Case(num_keys=31),
        Case(num_keys=280, num_queries=2),
    ]
    heads = Heads(num_heads=9, num_kv_heads=3, head_dim=64)
    for dtype in (torch.float32, torch.bfloat16):
        step, results = lay_out(cases, heads).to(dtype), []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            plan = step.plan(level, None, 4)
            received = torch.zeros(plan.received_size)
            result_TA = level.attention(step.q_THD, step.kv_SPD, plan, received=received)
            results.append((result_TA, received))
        assert all(
            torch.equal(x, y) for r in results[1:] for x, y in zip(r, results[0], strict=True)
        )
        at = 0
        for index, case in enumerate(cases):
            rows = step.batch.query_rows_T[at : at + case.num_queries]
            alone = {
                name: getattr(step.batch, name)[index : index + 1]
                for name in ("num_queries_B", "query_start_B", "row_B", "num_keys_B")
            }
            single = lay_out([case], heads)
            for name, value in alone.items():
                object.__setattr__(single.batch, name, value)
            object.__setattr__(single.batch, "slots_RN", step.batch.slots_RN)
            object.__setattr__(single.batch, "query_rows_T", torch.arange(case.num_queries))
            by_itself = type(step)(
                q_THD=step.q_THD[rows], kv_SPD=step.kv_SPD, batch=single.batch, heads=heads
            )
            got_TA = level.attention(by_itself.q_THD, step.kv_SPD, by_itself.plan(level))
            assert torch.equal(got_TA, results[0][0][rows]), f"{dtype}, request {index}"
            at += case.num_queries


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
    ratio=st.sampled_from([(4, 1), (4, 2), (4, 4), (6, 2), (8, 1)]),
    head_dim=st.sampled_from([8, 20, 32, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    observe_queries=st.integers(1, 40),
)
def test_any_step(
    cases: list[Case],
    window: int | None,
    ratio: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    observe_queries: int,
) -> None:
    """The combination nobody thought of."""
    heads = Heads(num_heads=ratio[0], num_kv_heads=ratio[1], head_dim=head_dim)
    check(select(), lay_out(cases, heads).to(dtype), window, observe_queries)
