"""Guards the baseline: whole requests in, whole requests out, and nothing else changed."""

import pytest

from tests.scheduler.simulation import Simulation, lengths, simulate


def simulation(**options: int | str) -> Simulation:
    return simulate("static_batch", **options)


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


@pytest.mark.parametrize("phase_order", ["mixed", "prefill_first", "decode_first"])
def test_nobody_joins_a_batch_that_decodes(phase_order: str) -> None:
    """A batch left open while prompts stand back: the next prompt step takes strangers in."""
    sim = simulation(slots=200, tokens=10, max_phase_wait_steps=2, phase_order=phase_order)
    for _ in range(4):
        sim.add(8, 9)
    while not any(r.num_tokens > r.prompt_len + 1 for r in sim.requests):
        sim.step()
    batch = list(sim.scheduler.running)
    assert 1 <= len(batch) <= 3
    while not all(r.finished for r in batch):
        sim.step()
        assert set(sim.scheduler.running) <= set(batch)
    sim.run()


def test_prompts_first_fills_a_batch_that_one_step_cannot_hold() -> None:
    """The field's way, all prompts and then decode; in mixed order the first prompt to end closes the batch."""
    sizes = {}
    for phase_order in ("mixed", "prefill_first"):
        sim = simulation(slots=200, tokens=8, phase_order=phase_order)
        for _ in range(3):
            sim.add(8, 5)
        while not any(r.num_computed > r.prompt_len for r in sim.requests):
            plan = sim.step()
        sizes[phase_order] = len(sim.scheduler.running)
        assert lengths(plan)["0"] == 1
        sim.run()
    assert sizes == {"mixed": 2, "prefill_first": 3}


def test_who_comes_after_a_batch_was_cut_does_not_join_it() -> None:
    """A queue that ran empty leaves the batch open: with arrivals in time it is continuous batching for a while."""
    sim = simulation(slots=200, tokens=10)
    first = sim.add(25, 4)
    sim.step()
    late = sim.add(3, 2)
    while not first.finished:
        sim.step()
        assert late in sim.scheduler.waiting
    sim.run()
