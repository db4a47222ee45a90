"""Guards the slot accounting: no slot is lost, shared or moved, whatever the order of calls."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenrouter.kvcache import KVPool

NUM_SLOTS, MAX_ROWS, MAX_LEN = 24, 5, 12


class PoolMachine(RuleBasedStateMachine):
    """Acquire, extend and release in any order against a list of slots per row."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(num_slots=NUM_SLOTS, max_rows=MAX_ROWS, max_len=MAX_LEN)
        self.held: dict[int, list[int]] = {}
        self.peak = 0

    @precondition(lambda self: len(self.held) < MAX_ROWS)
    @rule(expected=st.integers(1, MAX_LEN + 3))
    def acquire(self, expected: int) -> None:
        row = self.pool.acquire_row(expected)
        assert row not in self.held and 0 <= row < MAX_ROWS
        self.held[row] = []

    @precondition(lambda self: len(self.held) == MAX_ROWS)
    @rule()
    def acquire_too_many(self) -> None:
        with pytest.raises(ValueError, match="no free row"):
            self.pool.acquire_row(3)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=st.integers(-2, MAX_LEN + 1))
    def extend(self, data: st.DataObject, more: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.held)))
        length = len(self.held[row]) + more
        fits = length <= MAX_LEN and more <= self.pool.free
        done = self.pool.extend(row, length)
        assert done == (more <= 0 or fits)
        if done and more > 0:
            self.held[row] = self.pool.slots_BN[row, :length].tolist()
            self.peak = max(self.peak, sum(map(len, self.held.values())))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.release(row)
        del self.held[row]

    @precondition(lambda self: len(self.held) < MAX_ROWS)
    @rule(data=st.data())
    def release_what_is_not_held(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from([r for r in range(MAX_ROWS) if r not in self.held]))
        with pytest.raises(ValueError, match=f"row {row} is not in use"):
            self.pool.release(row)

    @invariant()
    def integrity(self) -> None:
        self.pool.check_integrity()
        assert self.pool.live == sum(map(len, self.held.values()))
        assert self.pool.free == NUM_SLOTS - self.pool.live
        assert self.pool.num_free_rows == MAX_ROWS - len(self.held)
        assert self.pool.peak_live == self.peak

    @invariant()
    def held_slots_stay_where_they_are(self) -> None:
        for row, slots in self.held.items():
            assert self.pool.num_kept_B[row] == len(slots)
            assert self.pool.slots_BN[row, : len(slots)].tolist() == slots
            assert self.pool.positions_BN[row, : len(slots)].tolist() == list(range(len(slots)))

    @invariant()
    def first_slot_means_a_run(self) -> None:
        """Attention reads the run in place: a wrong promise is another request's KV."""
        for row, slots in self.held.items():
            first = self.pool.first_slot(row)
            assert first == -1 or slots == list(range(first, first + len(slots)))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_growing_requests_stay_in_a_run() -> None:
    """Neighbours that take each other's next slot: attention then gathers for ever."""
    pool = KVPool(num_slots=60, max_rows=4, max_len=20)
    rows = [pool.acquire_row(15) for _ in range(4)]
    for row, length in zip(rows, (3, 1, 7, 2), strict=True):
        assert pool.extend(row, length)
    for length in range(8, 16):
        for row in rows:
            assert pool.extend(row, length)
    assert all(pool.first_slot(row) >= 0 for row in rows)
    pool.check_integrity()


def test_a_promise_is_soft() -> None:
    """A reservation that refuses slots while some are free, or survives its request."""
    pool = KVPool(num_slots=10, max_rows=3, max_len=10)
    greedy, other = pool.acquire_row(10), pool.acquire_row(4)
    assert pool.extend(greedy, 2) and pool.extend(other, 8)
    assert pool.free == 0 and not pool.extend(greedy, 3)
    pool.release(other)
    assert pool.extend(greedy, 10)
    pool.release(greedy)
    row = pool.acquire_row(10)
    assert pool.extend(row, 10) and pool.first_slot(row) == 0
    pool.check_integrity()


def test_promises_end_with_their_requests() -> None:
    """Promises of the dead keep the living from neighbouring slots, more with every request."""
    pool = KVPool(num_slots=30, max_rows=4, max_len=20)
    for row in [pool.acquire_row(10), pool.acquire_row(10)]:
        pool.release(row)
    first, second = pool.acquire_row(20), pool.acquire_row(5)
    for length in range(1, 6):
        assert pool.extend(first, 3 * length) and pool.extend(second, length)
    assert pool.first_slot(first) >= 0 and pool.first_slot(second) >= 0


def test_a_broken_run_is_never_promised_again() -> None:
    """A row whose later slots happen to follow its first one, with a gap between."""
    pool = KVPool(num_slots=6, max_rows=2, max_len=6)
    row, wall = pool.acquire_row(1), pool.acquire_row(1)
    assert pool.extend(row, 1) and pool.extend(wall, 1)
    assert pool.extend(row, 4)
    slots = pool.slots_BN[row, :4]
    assert (np.diff(slots) == 1).all() == (pool.first_slot(row) >= 0)
    pool.release(wall)
    assert pool.extend(row, 5)
    assert pool.first_slot(row) == -1


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-4, 2, 2)])
def test_an_empty_pool_is_refused(sizes: tuple[int, int, int]) -> None:
    """A pool in which nothing can ever run."""
    slots, rows, length = sizes
    with pytest.raises(ValueError, match="a pool needs slots, rows and a length"):
        KVPool(num_slots=slots, max_rows=rows, max_len=length)


def test_integrity_check_sees_a_fault() -> None:
    """Guards the guard: a shared slot, a lost one and a wrong count are found."""
    for fault in ("shared", "lost", "count"):
        pool = KVPool(num_slots=8, max_rows=2, max_len=8)
        first, second = pool.acquire_row(4), pool.acquire_row(4)
        assert pool.extend(first, 3) and pool.extend(second, 3)
        pool.check_integrity()
        if fault == "shared":
            pool.slots_BN[second, 0] = pool.slots_BN[first, 0]
        elif fault == "lost":
            pool.num_kept_B[first] = 2
        else:
            pool.free -= 1
        with pytest.raises(AssertionError):
            pool.check_integrity()
