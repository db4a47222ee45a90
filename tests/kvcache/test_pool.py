"""Guards the slot accounting: no slot is lost, shared or moved, whatever the order of calls, in every layer group."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenrouter.kvcache import KVPool, SlotTable

NUM_SLOTS, MAX_ROWS, MAX_LEN = 24, 5, 12


def in_a_run(table: SlotTable, row: int) -> bool:
    """Whether attention can read the row's slots in place."""
    return bool((np.diff(table.slots_RN[row, : table.num_kept_R[row]]) == 1).all())


class PoolMachine(RuleBasedStateMachine):
    """Acquire, extend and release in any order against a list of slots per group and row."""

    num_groups: int

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(
            num_slots=NUM_SLOTS, max_rows=MAX_ROWS, max_len=MAX_LEN, num_groups=self.num_groups
        )
        self.held: dict[int, list[list[int]]] = {}
        self.positions: dict[int, list[list[int]]] = {}
        self.seen: dict[int, list[int]] = {}
        self.peak = 0

    def live(self, group: int) -> int:
        return sum(len(slots[group]) for slots in self.held.values())

    def note(self, row: int, seen: list[int]) -> None:
        """``seen``: tokens that the row has now got a slot for, per group."""
        for group, table in enumerate(self.pool.tables):
            slots = table.slots_RN[row, : table.num_kept_R[row]].tolist()
            before = self.held[row][group]
            assert slots[: len(before)] == before
            new = range(self.seen[row][group], max(seen[group], self.seen[row][group]))
            assert len(slots) == len(before) + len(new)
            self.held[row][group] = slots
            self.positions[row][group] += new
            self.seen[row][group] += len(new)
        self.peak = max(self.peak, *map(self.live, range(self.num_groups)))

    @precondition(lambda self: len(self.held) < MAX_ROWS)
    @rule(expected=st.integers(1, MAX_LEN + 3))
    def acquire(self, expected: int) -> None:
        row = self.pool.acquire_row(expected)
        assert row not in self.held and 0 <= row < MAX_ROWS
        self.held[row] = [[] for _ in range(self.num_groups)]
        self.positions[row] = [[] for _ in range(self.num_groups)]
        self.seen[row] = [0] * self.num_groups

    @precondition(lambda self: len(self.held) == MAX_ROWS)
    @rule()
    def acquire_too_many(self) -> None:
        with pytest.raises(ValueError, match="no free row"):
            self.pool.acquire_row(3)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=st.integers(-2, MAX_LEN + 1))
    def extend(self, data: st.DataObject, more: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.held)))
        seen = self.seen[row]
        length = max(seen) + more
        fits = length <= MAX_LEN and all(
            length - seen[group] <= NUM_SLOTS - self.live(group) for group in range(self.num_groups)
        )
        assert self.pool.extend(row, length) == fits
        if fits:
            self.note(row, [length] * self.num_groups)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Any entries of one group: the others keep slots, positions and order, and later tokens go on counting."""
        row = data.draw(st.sampled_from(sorted(self.held)))
        group = data.draw(st.integers(0, self.num_groups - 1))
        slots, positions = self.held[row][group], self.positions[row][group]
        kept = data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
        freed = self.pool.evict(row, group, np.array(kept, bool))
        assert freed == len(kept) - sum(kept)
        self.held[row][group] = [s for s, stays in zip(slots, kept, strict=True) if stays]
        self.positions[row][group] = [p for p, stays in zip(positions, kept, strict=True) if stays]

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
        live = [self.live(group) for group in range(self.num_groups)]
        assert [table.slots.used for table in self.pool.tables] == live
        assert [table.slots.free for table in self.pool.tables] == [NUM_SLOTS - n for n in live]
        assert self.pool.live == max(live) and self.pool.free == NUM_SLOTS - max(live)
        assert self.pool.cached == 0
        assert self.pool.num_free_rows == MAX_ROWS - len(self.held)
        assert self.pool.peak_used == self.peak

    @invariant()
    def held_slots_stay_where_they_are(self) -> None:
        for row, of_groups in self.held.items():
            parts = zip(self.pool.tables, of_groups, self.positions[row], strict=True)
            for table, slots, positions in parts:
                kept = len(slots)
                assert table.num_kept_R[row] == kept
                assert table.slots_RN[row, :kept].tolist() == slots
                assert table.positions_RN[row, :kept].tolist() == positions


class OneGroup(PoolMachine):
    """The default."""

    num_groups = 1


class ThreeGroups(PoolMachine):
    """Layers that keep other tokens than other layers."""

    num_groups = 3


TestOneGroup = OneGroup.TestCase
TestThreeGroups = ThreeGroups.TestCase
TestOneGroup.settings = TestThreeGroups.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None
)


def test_a_refusal_leaves_no_group_extended() -> None:
    """A group with room that takes slots before another refuses: the request's groups then disagree."""
    for full in range(3):
        pool = KVPool(num_slots=10, max_rows=2, max_len=10, num_groups=3)
        row, other = pool.acquire_row(5), pool.acquire_row(10)
        assert pool.extend(row, 2) and pool.extend(other, 7)
        for group in {0, 1, 2} - {full}:
            pool.evict(other, group, np.zeros(7, np.bool_))
        assert pool.free == 1 and pool.live == 9
        assert not pool.extend(row, 4)
        assert [table.num_kept_R[row] for table in pool.tables] == [2, 2, 2]
        assert pool.extend(row, 3)
        assert [table.num_kept_R[row] for table in pool.tables] == [3, 3, 3]
        pool.check_integrity()


def test_growing_requests_stay_in_a_run() -> None:
    """Neighbours that take each other's next slot: attention then gathers for ever."""
    pool = KVPool(num_slots=60, max_rows=4, max_len=20, num_groups=2)
    rows = [pool.acquire_row(15) for _ in range(4)]
    for row, length in zip(rows, (3, 1, 7, 2), strict=True):
        assert pool.extend(row, length)
    for length in range(8, 16):
        for row in rows:
            assert pool.extend(row, length)
    assert all(in_a_run(table, row) for table in pool.tables for row in rows)
    pool.check_integrity()


@pytest.mark.parametrize("step", [1, 2])
def test_a_promise_binds_while_other_slots_are_free(step: int) -> None:
    """A row that grows past its own promise into its neighbour's, one token at a time or several."""
    pool = KVPool(num_slots=30, max_rows=2, max_len=20)
    eager, neighbour = pool.acquire_row(4), pool.acquire_row(10)
    for length in range(step, 13, step):
        assert pool.extend(eager, length)
    for length in range(step, 11, step):
        assert pool.extend(neighbour, length)
    table = pool.tables[0]
    assert not in_a_run(table, eager) and in_a_run(table, neighbour)
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
    assert pool.extend(row, 10)
    assert pool.tables[0].slots_RN[row].tolist() == list(range(10))
    pool.check_integrity()


def test_promises_end_with_their_requests() -> None:
    """Promises of the dead keep the living from neighbouring slots, more with every request."""
    pool = KVPool(num_slots=30, max_rows=2, max_len=20)
    for row in [pool.acquire_row(10), pool.acquire_row(10)]:
        pool.release(row)
    first, second = pool.acquire_row(20), pool.acquire_row(5)
    for length in range(1, 6):
        assert pool.extend(first, 3 * length) and pool.extend(second, length)
    assert in_a_run(pool.tables[0], first) and in_a_run(pool.tables[0], second)


def test_a_row_grows_around_a_wall() -> None:
    """A decode token that takes the next slot though another request has it, or one beyond the last."""
    pool = KVPool(num_slots=6, max_rows=2, max_len=6)
    row, wall = pool.acquire_row(1), pool.acquire_row(1)
    assert pool.extend(row, 1) and pool.extend(wall, 1)
    for length in range(2, 6):
        assert pool.extend(row, length)
        pool.check_integrity()
    assert pool.tables[0].slots_RN[row, :5].tolist() == [0, 2, 3, 4, 5]
    pool.release(wall)
    assert pool.extend(row, 6)
    assert pool.tables[0].slots_RN[row].tolist() == [0, 2, 3, 4, 5, 1]
    pool.check_integrity()


@pytest.mark.parametrize(
    "sizes", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (-4, 2, 2, 2), (1, 1, 1, 0)]
)
def test_an_empty_pool_is_refused(sizes: tuple[int, int, int, int]) -> None:
    """A pool in which nothing can ever run, or that no layer has a table in."""
    slots, rows, length, groups = sizes
    with pytest.raises(
        ValueError, match=f"at least 1 slot.*got {slots}, {rows}, {length}, {groups}$"
    ):
        KVPool(num_slots=slots, max_rows=rows, max_len=length, num_groups=groups)


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("shared", "references of rows"),
        ("lost", "references of rows"),
        ("count", "free slots miscounted"),
        ("twice", "a slot twice"),
        ("positions", "positions disordered"),
        ("free row", "a free row holds slots"),
    ],
)
def test_integrity_check_sees_a_fault(fault: str, message: str, group: int) -> None:
    """Guards the guard, in every group: a shared slot, a lost one, a wrong count, position or row."""
    pool = KVPool(num_slots=8, max_rows=3, max_len=8, num_groups=2)
    first, second = pool.acquire_row(4), pool.acquire_row(4)
    assert pool.extend(first, 3) and pool.extend(second, 3)
    pool.check_integrity()
    table = pool.tables[group]
    if fault == "shared":
        table.slots_RN[second, 0] = table.slots_RN[first, 0]
    elif fault == "lost":
        table.num_kept_R[first] = 2
    elif fault == "count":
        table.slots.free -= 1
    elif fault == "twice":
        table.slots.leave(table.slots_RN[first, :1])
        table.slots.use(table.slots_RN[first, 1:2])
        table.slots_RN[first, 0] = table.slots_RN[first, 1]
    elif fault == "positions":
        table.positions_RN[first, :2] = [1, 0]
    else:
        table.extend(next(row for row in range(3) if row not in (first, second)), 1)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity()


def test_long_expectations_do_not_scatter_the_others() -> None:
    """A promise of a whole model's length to the first few: all others searched the pool for every token."""
    pool = KVPool(num_slots=3200, max_rows=32, max_len=3000)
    rows = [pool.acquire_row(3000) for _ in range(32)]
    for length in range(1, 91):
        for row in rows:
            assert pool.extend(row, length)
    table = pool.tables[0]
    assert all((np.diff(table.slots_RN[row, :90]) == 1).all() for row in rows)


def test_a_row_beyond_its_share_goes_on_in_runs() -> None:
    """Token by token into the gaps of others, once the first run is used up."""
    pool = KVPool(num_slots=4096, max_rows=4, max_len=2000)
    first, second = pool.acquire_row(2000), pool.acquire_row(2000)
    for length in range(1, 1501):
        assert pool.extend(first, length) and pool.extend(second, min(length, 100))
    breaks = int((np.diff(pool.tables[0].slots_RN[first, :1500]) != 1).sum())
    assert breaks <= 3
    pool.check_integrity()
