"""Guards the order of each policy: who is admitted, who gets prompt tokens, and who is preempted."""

import logging

import pytest

from tests.scheduler.simulation import Simulation, lengths, simulate
from tokenrouter.scheduler import POLICIES, Request


def admitted(sim: Simulation) -> list[str]:
    """Names in the order in which they first ran."""
    order: list[str] = []
    while sim.scheduler.has_unfinished:
        order += [name for name in lengths(sim.step()) if name not in order]
    return order


def test_every_policy_is_called_by_its_name() -> None:
    """A warning that names another policy; a class under two names."""
    assert {name: policy.name for name, policy in POLICIES.items()} == {n: n for n in POLICIES}


def test_priority_admits_the_lowest_number_first_and_equals_by_arrival() -> None:
    """Higher first, or arrival forgotten."""
    sim = simulate("priority", rows=1)
    for priority in (2, 0, -1, 2, 0, 7):
        sim.add(3, 2, priority)
    assert admitted(sim) == ["2", "1", "4", "0", "3", "5"]


def test_shortest_first_counts_prompt_and_output() -> None:
    """By the prompt alone, a short question with a long answer goes first."""
    sim = simulate("shortest_first", rows=1)
    for prompt_len, num_output in ((2, 30), (10, 2), (6, 5), (1, 10), (4, 40)):
        sim.add(prompt_len, num_output)
    assert admitted(sim) == ["2", "3", "1", "0", "4"]


def test_shortest_first_spares_who_is_nearly_done() -> None:
    """Ranked by the whole length, a request of which a few tokens are left is preempted for one that has just begun."""
    sim = simulate("shortest_first", slots=44, tokens=44)
    nearly = sim.add(25, 15)
    while nearly.num_computed < 30:
        sim.step()
    fresh = sim.add(8, 12)
    preempted: tuple[Request, ...] = ()
    while not preempted:
        preempted = sim.step().preempted
    assert preempted == (fresh,) and nearly.max_total > fresh.max_total
    sim.run()


@pytest.mark.parametrize(
    ("policy", "victim"), [("fcfs", "2"), ("priority", "0"), ("shortest_first", "1")]
)
def test_the_last_in_the_order_is_preempted(policy: str, victim: str) -> None:
    """The youngest, whatever the policy: an urgent request pays for one that can wait."""
    sim = simulate(policy, slots=40, tokens=30)
    sim.add(8, 15, priority=3)
    sim.add(8, 30, priority=2)
    sim.add(8, 12, priority=1)
    preempted: tuple[Request, ...] = ()
    while not preempted:
        preempted = sim.step().preempted
    assert [one.request_id for one in preempted] == [victim]
    sim.run()


@pytest.mark.parametrize("policy", ["priority", "shortest_first"])
def test_nobody_slips_past_the_first_in_the_order(policy: str) -> None:
    """The urgent one does not fit, the next does, and so it goes on for ever."""
    sim = simulate(policy, slots=40, tokens=40, max_len=40)
    sim.add(20, 9)
    sim.step()
    first, second = sim.add(25, 2, priority=1), sim.add(2, 30, priority=2)
    while not sim.requests[0].finished:
        sim.step()
        assert sim.scheduler.waiting == [first, second]
    sim.run()


def test_a_preempted_request_waits_in_its_place() -> None:
    """Put at the head of the queue, a victim of little urgency goes before all."""
    sim = simulate("priority", slots=26, tokens=30)
    urgent, patient = sim.add(8, 12, priority=0), sim.add(10, 12, priority=5)
    sim.step()
    late = sim.add(9, 3, priority=1)
    while not sim.step().preempted:
        assert sim.scheduler.waiting == [late]
    assert sim.scheduler.waiting == [late, patient] and urgent in sim.scheduler.running
    sim.run()


def test_a_priority_that_is_ignored_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Priorities given to a scheduler that has none, and no word."""
    with caplog.at_level(logging.WARNING):
        for policy in POLICIES:
            sim = simulate(policy)
            sim.add(2, 2, priority=0)
            sim.add(2, 2, priority=3)
            sim.add(2, 2, priority=4)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        f"request 1 has priority 3, which scheduler {policy} ignores: choose scheduler=priority"
        for policy in ("fcfs", "static_batch", "shortest_first")
    ]
