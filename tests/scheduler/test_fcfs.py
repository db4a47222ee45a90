"""Guards first come, first served: order, chunks, admission and preemption."""

from tests.scheduler.simulation import lengths
from tests.scheduler.simulation import simulate as simulation


def test_decode_first_then_chunks_of_the_oldest_then_new_ones() -> None:
    """A long prompt that stalls everybody's decode, or a new request that overtakes it."""
    sim = simulation()
    sim.add(4, 10)
    sim.add(30, 3)
    sim.add(5, 3)
    assert lengths(sim.step()) == {"0": 4, "1": 12}
    assert lengths(sim.step()) == {"0": 1, "1": 15}
    assert lengths(sim.step()) == {"0": 1, "1": 3, "2": 5}
    assert lengths(sim.step()) == {"0": 1, "1": 1, "2": 1}
    sim.run()


def test_no_overtaking_at_the_door() -> None:
    """A small request that slips past a large one, which then waits for ever."""
    sim = simulation(slots=40)
    sim.add(20, 2)
    large, small = sim.add(30, 2), sim.add(2, 2)
    for expected in ({"0": 16}, {"0": 4}, {"0": 1}):
        assert lengths(sim.step()) == expected, "there was room for the small one alone"
    assert list(sim.scheduler.waiting) == [large, small]
    assert lengths(sim.step()) == {"1": 16}
    sim.run()


def test_rows_and_seats_bound_admission() -> None:
    """More running requests than rows of the slot table."""
    sim = simulation(rows=3, tokens=50)
    for _ in range(7):
        sim.add(2, 4)
    assert lengths(sim.step()) == {"0": 2, "1": 2, "2": 2}
    sim.run()


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    """A victim that loses its place in the queue; an old request that never gets done."""
    sim = simulation(slots=24, tokens=24)
    first, second = sim.add(10, 12), sim.add(12, 12)
    late = sim.add(5, 3)
    sim.step()
    plan = sim.step()
    while not plan.preempted:
        plan = sim.step()
    assert plan.preempted == (second,)
    assert list(sim.scheduler.waiting) == [second, late]
    assert second.num_preemptions == 1 and first.num_preemptions == 0
    while second not in sim.scheduler.running:
        sim.step()
    assert first.finished and not late.finished
    sim.run()
    assert first.num_preemptions == 0


def test_the_oldest_is_never_preempted() -> None:
    """Two requests that throw each other out in turns."""
    sim = simulation(slots=30, tokens=8)
    for index in range(6):
        sim.add(8 + index, 15)
    while sim.scheduler.has_unfinished:
        oldest = min((r for r in sim.requests if not r.finished), key=lambda r: int(r.request_id))
        before = oldest.num_preemptions
        sim.step()
        assert oldest.num_preemptions == before
    assert sim.num_preemptions > 0


def test_finish_is_idempotent() -> None:
    """A request that ends twice (its last token, and an abort) frees another one's row."""
    sim = simulation()
    one, two = sim.add(4, 5), sim.add(4, 5)
    sim.step()
    sim.abort(one)
    sim.abort(one)
    assert sim.pool.live == 4 and two in sim.scheduler.running
    waiting = sim.add(3, 3)
    sim.abort(waiting)
    sim.abort(waiting)
    sim.run()
