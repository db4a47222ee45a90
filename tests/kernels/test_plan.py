"""Guards what a plan of attention holds: its own copies, an arena of one layout, and queries that never look ahead."""

from typing import Any

import pytest
import torch

from tests.kernels.attention_cases import Case, Heads, Step, check, lay_out
from tests.kernels.conftest import Typed
from tokenrouter.kernels import Int8Entries, KernelSet

STEPS = {
    "decode": [Case(num_keys=70, scattered=True), Case(num_keys=600), Case(num_keys=3)],
    "prefill": [Case(num_keys=90, num_queries=40, scattered=True), Case(num_keys=9, num_queries=9)],
    "evicted": [
        Case(num_keys=6, num_queries=2, kept=(0, 1, 5, 20, 21, 22)),
        Case(num_keys=12, kept=tuple(range(0, 60, 5)), scattered=True),
    ],
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("rubbish", [0, 2**40])
def test_a_table_that_changes_after_planning(kernels: KernelSet, name: str, rubbish: int) -> None:
    """Slots read through a table that has moved on to the next step: another request's entries, or a crash."""
    step = lay_out(STEPS[name], Heads(num_heads=6, num_kv_heads=2, head_dim=16))
    results = []
    for changes in (False, True):
        plan = step.plan(kernels, window=50, observe_queries=3)
        if changes:
            for tensor in (step.batch.slots_RN, step.batch.positions_RN, step.batch.query_rows_T):
                if tensor is not None:
                    tensor.fill_(rubbish)
        received = torch.zeros(plan.received_size)
        out_TA = kernels.attention(step.q_THD, step.kv_SPD, plan, received=received)
        results.append((out_TA, received))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_plans_that_live_at_the_same_time(kernels: KernelSet) -> None:
    """Copies of one plan in memory that the next one reuses: the layers of a model with two windows."""
    steps = [lay_out(cases, seed=seed) for seed, cases in enumerate(STEPS.values())]
    expected = [kernels.attention(s.q_THD, s.kv_SPD, s.plan(kernels)) for s in steps]
    plans = [step.plan(kernels) for step in steps]
    for _ in range(2):
        for step, plan, expected_TA in zip(steps, plans, expected, strict=True):
            assert torch.equal(kernels.attention(step.q_THD, step.kv_SPD, plan), expected_TA)


@pytest.mark.parametrize("window", [None, 4, 40])
@pytest.mark.parametrize("scattered", [False, True])
def test_a_query_never_sees_later_entries(
    kernels: KernelSet, scattered: bool, window: int | None
) -> None:
    """A single query that is shown entries behind it, which several queries are not."""
    cases = [
        Case(num_keys=20, scattered=scattered, gap=-5),
        Case(num_keys=20, scattered=scattered, gap=-19),
        Case(num_keys=450, scattered=scattered, gap=-200),
        Case(num_keys=20, num_queries=3, scattered=scattered, gap=-5),
        Case(num_keys=7, scattered=scattered),
    ]
    check(kernels, lay_out(cases), window)
    for case in cases:
        check(kernels, lay_out([case]), window)
    kept = (0, 1, 5, 20, 21, 22)
    check(kernels, lay_out([Case(num_keys=6, kept=kept, scattered=scattered, gap=-10)]), window)


def test_a_prompt_with_gaps_is_not_a_square(kernels: KernelSet) -> None:
    """As many queries as entries, from position 0, whose entries are not those positions."""
    step = lay_out([Case(num_keys=4, num_queries=4, kept=(0, 2, 3, 9), gap=-6)])
    assert int(step.batch.query_start_B[0]) == 0
    check(kernels, step)


@pytest.mark.parametrize("window", [0, -1, -(2**40)])
def test_a_window_that_shows_nothing(kernels: KernelSet, window: int) -> None:
    """0 as no window in one backend, and as no keys in the other."""
    with pytest.raises(ValueError, match=f"window={window} .* at least 1, or None"):
        lay_out([Case(num_keys=5)]).plan(kernels, window)


def arenas(step: Step, num_full: int, num_int8: int) -> dict[str, Any]:
    planes, dim = step.kv_SPD.shape[1:]
    int8 = Int8Entries(
        torch.zeros(num_int8, planes, dim, dtype=torch.int8), torch.zeros(num_int8, planes)
    )
    kv_SPD = torch.zeros(num_full, planes, dim, dtype=step.kv_SPD.dtype)
    return {"kv_SPD": kv_SPD, "int8": int8 if num_int8 else None}


@pytest.mark.parametrize(("num_full", "num_int8"), [(20, 0), (12, 0), (20, 8), (19, 1), (11, 9)])
def test_an_arena_of_another_layout(typed: Typed, num_full: int, num_int8: int) -> None:
    """As many slots, of which others are in int8: full entries read where int8 ones were meant, out of place."""
    step = lay_out([Case(num_keys=5), Case(num_keys=2, num_queries=2)], spare=4).to(typed.dtype)
    assert len(step.kv_SPD) == 12
    planned = step.batch, {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "scale": 0.3}
    plan = typed.kernels.plan_attention(
        planned[0], num_slots=20, num_int8=8, dtype=typed.dtype, **planned[1]
    )
    right = arenas(step, 12, 8)
    kv_SPD = right.pop("kv_SPD")
    assert typed.kernels.attention(step.q_THD, kv_SPD, plan, **right).isfinite().all()
    wrong = arenas(step, num_full, num_int8)
    kv_SPD = wrong.pop("kv_SPD")
    message = f"12 full entries and 8 in int8, got {num_full} and {num_int8}"
    with pytest.raises(ValueError, match=f"kv has another size than planned.*{message}"):
        typed.kernels.attention(step.q_THD, kv_SPD, plan, **wrong)


@pytest.mark.parametrize("num_int8", [-1, 12, 13])
def test_counts_that_leave_no_full_slot(kernels: KernelSet, num_int8: int) -> None:
    """The null slot, which padding reads, in int8 or nowhere."""
    step = lay_out([Case(num_keys=5)], spare=6)
    with pytest.raises(ValueError, match=f"num_int8={num_int8} must be .* below num_slots=12"):
        kernels.plan_attention(
            step.batch,
            num_slots=12,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            scale=0.3,
            dtype=torch.float32,
            num_int8=num_int8,
        )


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_no_tokens_and_no_out(typed: Typed, share: float) -> None:
    """A forward of nothing but cached tokens: an index into no rows, or a concatenation of nothing."""
    step = lay_out([Case(num_keys=5)]).to(typed.dtype).in_int8(share)
    none = torch.empty(0, dtype=torch.int64)
    for name in ("query_rows_T", "num_queries_B", "query_start_B", "row_B", "num_keys_B"):
        object.__setattr__(step.batch, name, none)
    plan = step.plan(typed.kernels)
    q_THD = torch.empty(0, 4, 8, dtype=typed.dtype)
    out_TA = typed.kernels.attention(q_THD, step.kv_SPD, plan, int8=step.int8)
    assert out_TA.shape == (0, 32) and out_TA.dtype == typed.dtype
    rows_TD, qkv_TO = torch.empty(2, 0, 8, dtype=typed.dtype), torch.empty(0, 64, dtype=typed.dtype)
    attended_TA = typed.kernels.attend(qkv_TO, *rows_TD, none, step.kv_SPD, plan, int8=step.int8)
    assert attended_TA.shape == (0, 32) and attended_TA.dtype == typed.dtype
