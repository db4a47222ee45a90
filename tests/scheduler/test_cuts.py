"""Guards cuts: chunks that end where a request's own positions reach a multiple."""

import pytest

from tests.scheduler.simulation import lengths, simulate
from tokenrouter.scheduler import POLICIES


@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_end_at_every_multiple(policy: str) -> None:
    """A chunk as long as the budget, over positions at which something must happen first."""
    sim = simulate(policy, tokens=16, cut_every=6)
    sim.add(15, 3)
    assert [lengths(sim.step()) for _ in range(4)] == [{"0": 6}, {"0": 6}, {"0": 3}, {"0": 1}]


def test_a_chunk_that_begins_between_ends_at_the_next_one() -> None:
    """Chunks of a fixed length from wherever they begin: after a budget's end all lie across the multiples."""
    sim = simulate(tokens=10, cut_every=6)
    sim.add(7, 1)
    sim.add(16, 1)
    assert [lengths(sim.step()) for _ in range(3)] == [{"0": 6, "1": 4}, {"0": 1, "1": 2}, {"1": 6}]


def test_a_recompute_ends_there_too() -> None:
    """After a preemption, prompt and output come back in one chunk, and it runs over the multiples."""
    sim = simulate(slots=24, tokens=24, cut_every=5)
    sim.add(8, 14)
    victim = sim.add(9, 12)
    while not victim.num_preemptions:
        sim.step()
    known = victim.num_tokens
    assert known > 10
    chunks: list[int] = []
    while victim.num_tokens == known:
        chunks += [n for name, n in lengths(sim.step()).items() if name == "1"]
    assert chunks == [5] * (known // 5) + [known % 5] * (known % 5 > 0)
    sim.run()


def test_a_cut_must_be_a_length() -> None:
    """A division by zero in a step."""
    with pytest.raises(ValueError, match="cut_every must be at least 1, got 0"):
        simulate(cut_every=0)
