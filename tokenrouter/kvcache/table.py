"""One layer group's slots: which row has which, where its tokens came from, and what is free.

Neighbouring slots are read fastest by attention, and a token that takes the next neighbour costs no search. So a new
row starts where a free run as long as it may become begins, its fair share of the pool at most, and the run is kept for
it softly: others take those slots only when nothing else is free. A row that cannot go on gets another run.

R rows (requests), N tokens of a row, S slots.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FREE = -1
NEXT_RUN = 256  # slots that are kept for a row whose first run is used up


class Moves(NamedTuple):
    """Entries that change their slots: from ``before_N[i]`` to ``after_N[i]``, both int64."""

    before_N: NDArray[np.int64]
    after_N: NDArray[np.int64]


class SlotTable:
    """Slots, original positions and owners of one layer group. ``KVPool`` decides which rows are in use.

    New tokens get slots ``first_slot`` to ``first_slot + num_slots``. The null slot follows, and behind it slots for
    entries that are converted to int8 later.

    Invariant after every call: free + live + cached == num_slots, and a slot belongs to one row at most
    (``check_integrity``).

    Attributes:
        num_slots: slots for new tokens, and the most entries at once, of both forms.
        first_slot: the first of them: 0, or 1 where the null slot comes before them (a cache that is int8 throughout).
        slots_RN: int64 ``[max_rows, max_len]``; the first ``num_kept_R[row]`` entries are its slots, oldest first.
        positions_RN: int64, original positions of those entries in their request, ascending.
        num_kept_R: int64, entries per row.
        num_seen_R: int64, tokens that got a slot so far, per row; those that were evicted count.
        free: entries that there is still room for.
        cached: slots that belong to the prefix cache: 0 until prefix sharing exists.
        converted: live entries in int8 slots behind the null slot.
        peak_live: the most entries that were live at once.
        num_touched: slots that were ever taken since their memory was last given back: what the arena's pages hold.
        peak_touched: the most of them at once.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_rows: int,
        max_len: int,
        first_slot: int = 0,
        num_int8: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self.first_slot = first_slot
        self.slots_RN: NDArray[np.int64] = np.zeros((max_rows, max_len), np.int64)
        self.positions_RN: NDArray[np.int64] = np.zeros((max_rows, max_len), np.int64)
        self.num_kept_R: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self.num_seen_R: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self._end = first_slot + num_slots
        self._first_int8 = self._end + 1
        size = self._first_int8 + num_int8
        self._owner_S: NDArray[np.int32] = np.full(size, FREE, np.int32)
        self._promised_S: NDArray[np.int32] = np.full(size, FREE, np.int32)
        self._touched_S: NDArray[np.bool_] = np.zeros(size, np.bool_)
        self.free = num_slots
        self.cached = 0
        self.converted = 0
        self.peak_live = 0
        self.num_touched = 0
        self.peak_touched = 0

    @property
    def live(self) -> int:
        """Entries of all rows, converted ones among them."""
        return self.num_slots - self.free - self.cached

    def promise(self, row: int, expected_len: int) -> None:
        """Marks the first free, unpromised run of ``expected_len`` slots for ``row``; none, none marked.

        Its fair share of the pool at most: the promises of a few must not drive the others into gaps.
        """
        expected_len = min(expected_len, max(self.num_slots // len(self.num_kept_R), 1))
        self._mark(row, expected_len)

    def _mark(self, row: int, wanted: int) -> None:
        """Promises the first open run of ``wanted`` slots, if there is one."""
        new = slice(self.first_slot, self._end)
        open_S = (self._owner_S[new] == FREE) & (self._promised_S[new] == FREE)
        edges = np.flatnonzero(np.diff(open_S, prepend=False, append=False))
        starts, ends = edges[::2], edges[1::2]
        fits = np.flatnonzero(ends - starts >= wanted)
        if len(fits):
            start = self.first_slot + int(starts[fits[0]])
            self._promised_S[start : start + wanted] = row

    def fits(self, row: int, length: int) -> bool:
        """Whether ``extend`` to ``length`` tokens, ``max_len`` at most, finds enough free slots."""
        return length - int(self.num_seen_R[row]) <= self.free

    def extend(self, row: int, length: int) -> None:
        """Gives ``row`` slots up to its first ``length`` tokens, which must fit; a row that has seen as many stays."""
        kept, seen = int(self.num_kept_R[row]), int(self.num_seen_R[row])
        wanted = length - seen
        if wanted <= 0 or (wanted == 1 and kept and self._append(row, kept, seen)):
            return
        found = self._take(row, kept, wanted)
        self.slots_RN[row, kept : kept + wanted] = found
        self.positions_RN[row, kept : kept + wanted] = np.arange(seen, length)
        self._own(row, found)
        self._count(row, wanted)

    def evict(self, row: int, is_kept_N: NDArray[np.bool_]) -> int:
        """Frees, at once, the slots of the row's entries that are not kept; the others close ranks in their order.

        Args:
            row: in use.
            is_kept_N: one per entry.

        Returns:
            How many were freed.
        """
        kept = int(self.num_kept_R[row])
        assert is_kept_N.shape == (kept,), "one answer per entry"
        left = int(is_kept_N.sum())
        self._disown(self.slots_RN[row, :kept][~is_kept_N])
        for entries_RN in (self.slots_RN, self.positions_RN):
            entries_RN[row, :left] = entries_RN[row, :kept][is_kept_N]
        self.num_kept_R[row] = left
        return kept - left

    def convert(self, row: int, is_chosen_N: NDArray[np.bool_]) -> Moves:
        """Moves chosen entries of a row to int8 slots; those that are there stay. They count as they did before.

        Args:
            row: in use.
            is_chosen_N: one per entry.

        Returns:
            What the caller must quantise and move.
        """
        slots_N = self.slots_RN[row, : self.num_kept_R[row]]
        chosen = np.flatnonzero(is_chosen_N & (slots_N < self._first_int8))
        free = np.flatnonzero(self._owner_S[self._first_int8 :] == FREE)[: len(chosen)]
        assert len(free) == len(chosen), "fewer int8 slots than slots"
        before, after = slots_N[chosen].copy(), self._first_int8 + free
        self._disown(before)
        self._own(row, after)
        self.free -= len(after)
        self.converted += len(after)
        slots_N[chosen] = after
        return Moves(before, after)

    def restore(
        self,
        row: int,
        positions_N: NDArray[np.int64],
        num_seen: int,
        is_int8_N: NDArray[np.bool_],
    ) -> None:
        """Gives a fresh row slots for entries that it had before, which must fit; converted ones get int8 slots again.

        Args:
            row: without entries.
            positions_N: original positions, ascending.
            num_seen: tokens that the row has then seen.
            is_int8_N: where new tokens are full: which entries were converted.
        """
        assert not self.num_kept_R[row] and len(positions_N) <= self.free
        if len(positions_N):
            found = self._take(row, 0, len(positions_N))
            self.slots_RN[row, : len(found)] = found
            self.positions_RN[row, : len(found)] = positions_N
            self._own(row, found)
            self._count(row, len(found))
        self.num_seen_R[row] = num_seen
        if self.first_slot == 0 and is_int8_N.any():
            self.convert(row, is_int8_N)

    def close_ranks(self) -> Moves:
        """Moves all entries to the first slots of their form, row by row, so that other memory can be given back.

        Promises lapse. The caller moves what the slots hold; those behind the moved ones are untouched.
        """
        rows = np.repeat(np.arange(len(self.num_kept_R)), self.num_kept_R)
        held = [self.slots_RN[row, :kept] for row, kept in enumerate(self.num_kept_R)]
        before = np.concatenate(held)
        is_int8 = before >= self._first_int8
        after = np.where(
            is_int8,
            self._first_int8 + np.cumsum(is_int8) - 1,
            self.first_slot + np.cumsum(~is_int8) - 1,
        )
        self._owner_S[:] = FREE
        self._promised_S[:] = FREE
        self._touched_S[:] = False
        self.num_touched = 0
        self._own(rows, after)
        for slots_N, moved in zip(
            held, np.split(after, np.cumsum(self.num_kept_R)[:-1]), strict=True
        ):
            slots_N[:] = moved
        return Moves(before, after)

    def release(self, row: int) -> None:
        """Frees the row's slots at once, and what was promised to it."""
        self._disown(self.slots_RN[row, : self.num_kept_R[row]])
        self._promised_S[self._promised_S == row] = FREE
        self.num_kept_R[row] = self.num_seen_R[row] = 0

    def check_integrity(self) -> None:
        """Asserts the invariant from scratch."""
        used = [self.slots_RN[row, :kept] for row, kept in enumerate(self.num_kept_R)]
        all_used = np.concatenate(used)
        assert len(np.unique(all_used)) == len(all_used), "a slot belongs to two requests"
        num_converted = int((all_used >= self._first_int8).sum())
        assert num_converted == self.converted, "int8 entries miscounted"
        assert len(all_used) == self.live, "live slots and slot tables disagree"
        assert not np.isin(self._end, all_used), "the null slot was handed out"
        assert self.num_touched == int(self._touched_S.sum()), "touched slots miscounted"
        assert self._touched_S[all_used].all(), "an entry in a slot that was never touched"
        num_owned = int((self._owner_S != FREE).sum())
        assert num_owned == self.live, "owners and live count disagree"
        for row, slots_N in enumerate(used):
            assert (self._owner_S[slots_N] == row).all(), f"row {row} does not own its slots"
            positions_N = self.positions_RN[row, : len(slots_N)]
            assert (np.diff(positions_N, prepend=-1) > 0).all(), f"row {row}: positions disordered"
            seen = self.num_seen_R[row]
            assert not len(slots_N) or positions_N[-1] < seen, f"row {row}: an entry not seen yet"

    def _append(self, row: int, kept: int, seen: int) -> bool:
        """A decode token takes the next neighbour when that is free; False, and nothing changed, when it is not."""
        slot = int(self.slots_RN[row, kept - 1]) + 1
        if slot >= self._end or self._owner_S[slot] != FREE:
            return False
        if self._promised_S[slot] not in (row, FREE):
            return False
        self.slots_RN[row, kept] = slot
        self.positions_RN[row, kept] = seen
        self._owner_S[slot] = row
        self.num_touched += not self._touched_S[slot]
        self._touched_S[slot] = True
        self._count(row, 1)
        return True

    def _own(self, row: int | NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        self._owner_S[slots] = row
        self.num_touched += len(slots) - int(self._touched_S[slots].sum())
        self._touched_S[slots] = True

    def _disown(self, slots: NDArray[np.int64]) -> None:
        """Counts and owners; the row's own entries are the caller's."""
        self._owner_S[slots] = FREE
        num_converted = int((slots >= self._first_int8).sum())
        self.converted -= num_converted
        self.free += len(slots)

    def _count(self, row: int, taken: int) -> None:
        self.num_kept_R[row] += taken
        self.num_seen_R[row] += taken
        self.free -= taken
        self.peak_live = max(self.peak_live, self.live)
        self.peak_touched = max(self.peak_touched, self.num_touched)

    def _take(self, row: int, kept: int, wanted: int) -> NDArray[np.int64]:
        """Slots for the next ``wanted`` tokens: next neighbours, what is promised (a new run), unpromised, any."""
        follow = int(self.slots_RN[row, kept - 1]) + 1 if kept else -1
        if kept and follow + wanted <= self._end:
            run = slice(follow, follow + wanted)
            promised = self._promised_S[run]
            if (self._owner_S[run] == FREE).all() and (
                (promised == row) | (promised == FREE)
            ).all():
                return np.arange(follow, follow + wanted)
        if kept:
            self._mark(row, max(wanted, NEXT_RUN))
        new = slice(self.first_slot, self._end)
        candidates = self.first_slot + np.flatnonzero(self._owner_S[new] == FREE)
        promised = self._promised_S[candidates]
        rank = np.where(promised == row, 0, np.where(promised == FREE, 1, 2))
        return candidates[np.argsort(rank, kind="stable")[:wanted]]
