"""Guards the baseline: whole requests in, whole requests out, and nothing else changed."""

import pytest

from tests.scheduler.simulation import Simulation
from tokenrouter.kvcache import KVPool
from tokenrouter.scheduler import StaticBatchScheduler


def simulation(*, slots: int = 100, tokens: int = 16, batch_size: int = 3) -> Simulation:
    pool = KVPool(num_slots=slots, max_rows=8, max_len=100)
    return Simulation(
        StaticBatchScheduler(
            pool=pool, max_num_seqs=8, max_num_batched_tokens=tokens, batch_size=batch_size
        )
    )


def test_nobody_joins_and_nobody_leaves_early() -> None:
    """Continuous batching under another name: the baseline would look better than it is."""
    sim = simulation()
    outputs = [2, 9, 4, 2, 3]
    for num_output in outputs:
        sim.add(5, num_output)
    batches: list[set[str]] = []
    while sim.scheduler.has_unfinished:
        sim.step()
        batch = {r.request_id for r in sim.scheduler.running}
        if batch and (not batches or batch != batches[-1]):
            batches.append(batch)
    assert {"0", "1", "2"} in batches
    for batch in batches:
        assert batch <= {"0", "1", "2"} or batch <= {"3", "4"}, "two batches mixed"
    assert sim.pool.free == sim.pool.num_slots


def test_slots_are_held_until_the_batch_is_done() -> None:
    """Freed early, the memory of static batching would be reported as that of continuous batching."""
    sim = simulation(tokens=50)
    short, long = sim.add(10, 1), sim.add(10, 8)
    sim.step()
    assert short.finished and sim.pool.live == 20
    sim.step()
    assert sim.pool.live == 21
    sim.run()
    assert long.finished


def test_a_finished_request_gives_way_before_anyone_is_preempted() -> None:
    """A batch mate loses its work while dead slots are held."""
    sim = simulation(slots=24, tokens=30)
    sim.add(10, 1)
    sim.add(10, 13)
    sim.run()
    assert sim.num_preemptions == 0


def test_a_batch_that_does_not_fit_is_closed_short() -> None:
    """A request that joins later, when decoding has begun and slots have come free."""
    sim = simulation(slots=30, tokens=40)
    for _ in range(3):
        sim.add(12, 4)
    sim.step()
    assert len(sim.scheduler.running) == 2
    for _ in range(2):
        sim.step()
        assert len(sim.scheduler.running) == 2
    sim.run()


def test_aborts_release_a_batch_in_which_all_are_done() -> None:
    """The last unfinished one is aborted: the others' slots wait for a token that never comes."""
    sim = simulation(tokens=50)
    first, second = sim.add(5, 1), sim.add(5, 9)
    waiting = sim.add(5, 2)
    late = sim.add(5, 2)
    sim.step()
    sim.abort(waiting)
    assert first.finished
    sim.abort(second)
    assert sim.pool.free == sim.pool.num_slots
    sim.run()
    assert late.finished


@pytest.mark.parametrize("batch_size", [0, 9])
def test_batch_size_must_fit_the_seats(batch_size: int) -> None:
    """A batch larger than the engine has rows for never fills."""
    with pytest.raises(
        ValueError, match=rf"batch_size {batch_size} must lie in 1 \.\. max_num_seqs 8"
    ):
        simulation(batch_size=batch_size)
