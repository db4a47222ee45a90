"""Guards the two phases: which goes first, how much of each a step holds, and that neither stands back for ever."""

import math

import pytest

from tests.scheduler.simulation import Simulation, lengths, simulate


def begin(sim: Simulation, count: int, prompt_len: int = 2, num_output: int = 40) -> None:
    """Requests that all decode."""
    for _ in range(count):
        sim.add(prompt_len, num_output)
    while not all(one.decoding for one in sim.requests):
        sim.step()


def test_prefill_first_runs_prompts_alone() -> None:
    """Decode tokens in a step of prompts: the order has no effect."""
    sim = simulate(phase_order="prefill_first", tokens=10, max_phase_wait_steps=8)
    begin(sim, 2)
    sim.add(25, 3)
    assert [lengths(sim.step()) for _ in range(4)] == [
        {"2": 10},
        {"2": 10},
        {"2": 5},
        {"0": 1, "1": 1, "2": 1},
    ]


def test_decode_stands_back_no_longer_than_it_may() -> None:
    """A long prompt stalls everybody's output; when decode's step comes, prompts run with it."""
    sim = simulate(phase_order="prefill_first", tokens=10, max_phase_wait_steps=2)
    begin(sim, 2)
    sim.add(50, 3)
    assert [lengths(sim.step()) for _ in range(5)] == [
        {"2": 10},
        {"2": 10},
        {"0": 1, "1": 1, "2": 8},
        {"2": 10},
        {"2": 10},
    ]


def test_prefill_first_decodes_where_no_prompt_can_run() -> None:
    """A queue without room that keeps decode back, which alone would make room: nothing ever runs."""
    sim = simulate(phase_order="prefill_first", rows=2)
    begin(sim, 2)
    sim.add(4, 3)
    assert lengths(sim.step()) == {"0": 1, "1": 1}
    small = simulate(phase_order="prefill_first", slots=12)
    begin(small, 1)
    small.add(11, 1)
    assert lengths(small.step()) == {"0": 1}


def test_decode_first_lets_prompts_in_every_so_many_steps() -> None:
    """A new request admitted at once, or only when nothing decodes any more."""
    sim = simulate(phase_order="decode_first", tokens=10, max_phase_wait_steps=3)
    begin(sim, 1)
    sim.add(4, 9)
    sim.add(12, 9)
    alone = {"0": 1}
    assert [lengths(sim.step()) for _ in range(4)] == [alone] * 3 + [{"0": 1, "1": 4, "2": 5}]
    both = {"0": 1, "1": 1}
    assert [lengths(sim.step()) for _ in range(4)] == [both] * 3 + [{"0": 1, "1": 1, "2": 7}]


def test_decode_first_runs_prompts_where_nothing_decodes() -> None:
    """Prompts that wait for a decode token which no one has."""
    sim = simulate(phase_order="decode_first", tokens=10)
    sim.add(25, 3)
    assert [lengths(sim.step()) for _ in range(3)] == [{"0": 10}, {"0": 10}, {"0": 5}]


def test_a_full_house_does_not_reset_the_wait() -> None:
    """Counted only while there is room, a wait begins anew whenever the pool is full for one step."""
    sim = simulate(phase_order="decode_first", rows=1, max_phase_wait_steps=3)
    sim.add(2, 5)
    sim.step()
    sim.add(4, 9)
    for _ in range(4):
        assert lengths(sim.step()) == {"0": 1}
    assert lengths(sim.step()) == {"1": 4}


@pytest.mark.parametrize("phase_order", ["prefill_first", "decode_first"])
def test_no_wait_is_the_mixed_order(phase_order: str) -> None:
    """0 steps read as no bound."""
    plans = []
    for order in (phase_order, "mixed"):
        sim = simulate(phase_order=order, tokens=10, max_phase_wait_steps=0)
        begin(sim, 2)
        sim.add(15, 4)
        sim.add(9, 4)
        plans.append([lengths(sim.step()) for _ in range(6)])
    assert plans[0] == plans[1]


def test_each_phase_keeps_its_budget() -> None:
    """Prompt tokens that fill a step though they may not; a budget that admits another prompt when it is spent."""
    sim = simulate(tokens=16, max_prefill_tokens=5, max_decode_tokens=2)
    begin(sim, 3)
    sim.add(7, 2)
    sim.add(6, 2)
    plans = [lengths(sim.step()) for _ in range(3)]
    prompts = [{k: n for k, n in plan.items() if k in "34"} for plan in plans]
    assert prompts[:2] == [{"3": 5}, {"3": 2, "4": 3}]
    assert [sum(plan.values()) for plan in plans[:2]] == [7, 7]
    sim.run()


def test_decode_takes_turns() -> None:
    """The first in the order take every step, and the last one waits until they are done."""
    sim = simulate(max_decode_tokens=2)
    begin(sim, 5)
    start = [one.num_tokens for one in sim.requests]
    plans = [lengths(sim.step()) for _ in range(10)]
    assert all(len(plan) == 2 for plan in plans)
    assert [one.num_tokens - n for one, n in zip(sim.requests, start, strict=True)] == [4] * 5


def test_what_a_preempted_request_had_is_given_back() -> None:
    """A budget that stays spent for a decode token which was dropped: the last prompt gets 3 of its 4 tokens."""
    sim = simulate("priority", slots=34, tokens=8, rows=3, cut_every=4)
    sim.add(4, 30, priority=5)
    sim.step()
    sim.add(20, 3, priority=1)
    sim.add(20, 3, priority=2)
    plan = sim.step()
    while not plan.preempted:
        plan = sim.step()
    assert plan.preempted == (sim.requests[0],) and lengths(plan) == {"1": 4, "2": 4}
    sim.run()


def test_standing_back_is_queue_time() -> None:
    """Seconds in which a decode token waits for its phase or its turn, and which no metric shows."""
    for options in ({"phase_order": "prefill_first"}, {"max_decode_tokens": 1}):
        sim = simulate(tokens=10, **options)
        begin(sim, 2)
        sim.add(20, 3)
        for one in sim.requests:
            one.waiting_since_s = math.nan
        planned = lengths(sim.step())
        waits = {one.request_id for one in sim.requests if not math.isnan(one.waiting_since_s)}
        assert waits == {"0", "1", "2"} - set(planned) and "2" in planned
        sim.run()
