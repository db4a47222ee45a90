"""Guards the bounds on waiting: no request is passed too often, and every one ends."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.simulation import Simulation, simulate
from tokenrouter.kvcache.retention import RetentionOptions, SinkWindow
from tokenrouter.scheduler import POLICIES, Request

LONGEST, MAX_PUT_OFF = 14, 2
every_policy = pytest.mark.parametrize("policy", POLICIES)

loads = st.fixed_dictionaries(
    {
        "phase_order": st.sampled_from(["mixed", "prefill_first", "decode_first"]),
        "rows": st.integers(1, 4),
        "more_tokens": st.integers(0, 12),
        "slots": st.integers(LONGEST, 3 * LONGEST),
        "max_prefill_tokens": st.sampled_from([None, 1, 3]),
        "max_decode_tokens": st.sampled_from([None, 1, 2]),
        "max_phase_wait_steps": st.integers(0, 3),
        "max_overtaken": st.integers(0, 5),
        "cut_every": st.sampled_from([None, 1, 4]),
        "before": st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), max_size=3),
        "rival": st.tuples(st.integers(1, 6), st.integers(1, 6)),
        "num_rivals": st.integers(1, 4),
        "only_while_it_runs": st.booleans(),
        "put_off": st.lists(st.booleans(), min_size=3, max_size=20),
    }
)
memories = st.fixed_dictionaries(
    {
        "host_slots": st.sampled_from([0, LONGEST, 3 * LONGEST]),
        "shares": st.booleans(),
        "retention": st.none()
        | st.builds(
            lambda kept, interval: RetentionOptions(
                policy=SinkWindow(evicted_frac=0.0, max_entries=kept),
                interval=interval,
                window=1,
                sinks=0,
                recent=1,
            ),
            st.integers(1, 6),
            st.integers(1, 4),
        ),
    }
)
NO_MEMORY: dict[str, Any] = {}


def make(policy: str, load: dict[str, Any], memory: dict[str, Any] = NO_MEMORY) -> Simulation:
    names = ("phase_order", "slots", "max_prefill_tokens", "max_phase_wait_steps", "max_overtaken")
    tokens = load["rows"] + load["more_tokens"]
    most = load["max_decode_tokens"]
    return simulate(
        policy,
        rows=load["rows"],
        tokens=tokens,
        batch_size=(load["rows"] + 1) // 2,
        cut_every=load["cut_every"],
        max_decode_tokens=None if most is None else min(most, load["rows"]),
        **{name: load[name] for name in names if name != "max_prefill_tokens"},
        max_prefill_tokens=min(load["max_prefill_tokens"] or tokens, tokens),
        **memory,
    )


def bounded(pattern: list[bool]) -> Callable[[Request], bool]:
    """Decode tokens wait for company by a pattern, each at most so many steps, as the dispatcher lets them."""
    flags = cycle(pattern)
    return lambda one: next(flags) and one.waited_steps < MAX_PUT_OFF


def most_steps(load: dict[str, Any], num_earlier: int) -> int:
    """What the design allows a request that came after ``num_earlier`` others.

    While it waits and nobody passes it, what runs is worked off, and while it runs each of its tokens waits for its
    turn and for the prompts of the others at most. Both happen again when one passes it, or an earlier one takes its
    slots.
    """
    worked_off = load["rows"] * LONGEST
    turn = load["rows"] * (MAX_PUT_OFF + 1) + worked_off
    rounds = (load["max_overtaken"] + 1) * (num_earlier + 1)
    return rounds * (load["max_phase_wait_steps"] + 1) * (worked_off + LONGEST * turn)


def starve(sim: Simulation, load: dict[str, Any]) -> None:
    """The least urgent and longest request, while others that every policy prefers keep coming for ever."""
    put_off = bounded(load["put_off"])
    for prompt_len, num_output in load["before"]:
        sim.add(prompt_len, num_output)
    victim = sim.add(LONGEST // 2, LONGEST // 2, priority=9)
    steps, bound = 0, most_steps(load, len(load["before"]))
    while not victim.finished:
        if victim in sim.scheduler.running or not load["only_while_it_runs"]:
            for _ in range(len(sim.scheduler.waiting), load["num_rivals"]):
                sim.add(*load["rival"])
        sim.step(put_off)
        steps += 1
        assert steps <= bound, "the request starves"
    sim.run(put_off)


@every_policy
@settings(max_examples=150, deadline=None)
@given(load=loads)
def test_a_stream_of_favoured_requests_cannot_hold_one_up(
    policy: str, load: dict[str, Any]
) -> None:
    """Each step of the simulation holds the number of times that anyone was passed, the turns of decode tokens and the
    phases that stand back against their bounds, too."""
    starve(make(policy, load), load)


@every_policy
@settings(max_examples=150, deadline=None)
@given(load=loads, memory=memories)
def test_neither_host_tier_nor_retention_nor_sharing_lets_one_starve(
    policy: str, load: dict[str, Any], memory: dict[str, Any]
) -> None:
    """A request that comes back from the host tier, or starts with a prefix, and passes others for it; slots that are
    freed while their owner runs and go to whoever comes last."""
    starve(make(policy, load, memory), load)


def test_the_simulation_swaps_evicts_and_shares() -> None:
    """A bound that holds because nothing of it ever happens."""
    for shares in (False, True):
        retention = RetentionOptions(
            policy=SinkWindow(evicted_frac=0.0, max_entries=6), interval=4, window=1, recent=1
        )
        sim = simulate(
            "priority", slots=24, rows=4, host_slots=80, shares=shares, retention=retention
        )
        for index in range(12):
            sim.add(7, 12, priority=12 - index)
            sim.step()
        sim.run()
        assert sim.num_evicted > 20 and sim.num_swapped > 0
        assert (sim.num_shared_tokens > 0) == shares


@pytest.mark.parametrize("policy", ["priority", "shortest_first"])
@pytest.mark.parametrize("max_overtaken", [0, 1, 5])
def test_the_bound_is_reached_and_not_passed(policy: str, max_overtaken: int) -> None:
    """An option that does nothing, or a policy that gives up its order long before."""
    sim = simulate(policy, rows=1, max_overtaken=max_overtaken)
    sim.add(2, 2)
    sim.step()
    victim = sim.add(5, 9, priority=9)
    while victim not in sim.scheduler.running:
        sim.add(2, 2)
        sim.step()
    assert victim.num_overtaken == sim.num_passed[victim.request_id] == max_overtaken
    sim.run()


def test_who_was_passed_often_enough_keeps_its_slots() -> None:
    """Aging at the door alone: a request gets its seat whenever one is free, and loses it to each that comes after."""
    sim = simulate("priority", slots=40, tokens=40, rows=2, max_overtaken=2)
    victim = sim.add(4, 36, priority=9)
    while not victim.finished:
        if victim in sim.scheduler.running and len(sim.scheduler.running) == 1:
            sim.add(20, 10)
        sim.step()
    assert sim.num_passed[victim.request_id] == 0, "it was passed at the door, which ages it, too"
    assert victim.num_preemptions == victim.num_overtaken == 2
    sim.run()


def test_those_passed_often_enough_go_by_arrival() -> None:
    """Two that wait too long, ordered by the rank that made them wait: the later one starves the earlier."""
    sim = simulate("priority", rows=1, max_overtaken=2)
    sim.add(2, 2)
    sim.step()
    first, second = sim.add(2, 2, priority=9), sim.add(2, 2, priority=8)
    sim.add(2, 2)
    sim.add(2, 2)
    while sim.scheduler.waiting != [first, second]:
        sim.step()
    assert first.num_overtaken == second.num_overtaken == 2
    sim.run()
