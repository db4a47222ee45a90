"""One layer group's entries: which slots a row has, oldest first, and where their tokens came from.

R rows (requests), N entries of a row.
"""

import numpy as np
from numpy.typing import NDArray

from tokenrouter.kvcache.moves import Moves
from tokenrouter.kvcache.slots import NOBODY, SlotArray, Slots


class SlotTable:
    """Slots and original positions of one layer group, row by row. ``KVPool`` decides which rows are in use.

    Attributes:
        slots: who uses which slot, and what is free.
        slots_RN: int64 ``[max_rows, max_len]``; the first ``num_kept_R[row]`` entries are its slots, oldest first.
        positions_RN: int64, original positions of those entries in their request, ascending.
        num_kept_R: int64, entries per row.
        num_seen_R: int64, tokens that got a slot so far, per row; those that were evicted count.
        num_adopted_R: int64, those of them that came with a prefix.
        num_changes_R: int64, how often a row's entries have changed otherwise than by new ones.
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
        """An empty table.

        Args:
            num_slots: slots for new tokens, and the most entries at once, of both forms.
            max_rows: requests at once.
            max_len: tokens that a row can hold.
            first_slot: the first slot: 0, or 1 where the null slot comes before (a cache that is int8 throughout).
            num_int8: slots behind the null slot, for entries that are converted to int8 later.
        """
        self.slots = Slots(
            num_slots=num_slots, max_rows=max_rows, first=first_slot, num_int8=num_int8
        )
        self.slots_RN: NDArray[np.int64] = np.zeros((max_rows, max_len), np.int64)
        self.positions_RN: NDArray[np.int64] = np.zeros((max_rows, max_len), np.int64)
        self.num_kept_R: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self.num_seen_R: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self.num_adopted_R: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self.num_changes_R: NDArray[np.int64] = np.zeros(max_rows, np.int64)

    def promise(self, row: int, expected_len: int) -> None:
        """Keeps a free run of ``expected_len`` slots for ``row``, softly; none is kept where there is none.

        Its fair share of the pool at most: the promises of a few must not drive the others into gaps.
        """
        fair = max(self.slots.num_slots // len(self.num_kept_R), 1)
        self.slots.promise(row, min(expected_len, fair))

    def extend(self, row: int, length: int) -> None:
        """Gives ``row`` slots up to its first ``length`` tokens, which must fit; a row that has seen as many stays."""
        kept, seen = int(self.num_kept_R[row]), int(self.num_seen_R[row])
        wanted = length - seen
        if wanted <= 0:
            return
        last = int(self.slots_RN[row, kept - 1]) if kept else NOBODY
        self._append(row, self.slots.take(row, last, wanted), np.arange(seen, length))
        self.num_seen_R[row] = length

    def extend_all(self, row_B: SlotArray, length_B: SlotArray) -> None:
        """``extend`` for different rows at once; a single token in the slot behind the row's newest needs no search."""
        kept_B, seen_B = self.num_kept_R[row_B], self.num_seen_R[row_B]
        is_next_B = (length_B - seen_B == 1) & (kept_B > 0)
        next_B, row_N = np.flatnonzero(is_next_B), row_B[is_next_B]
        slot_N, is_taken_N = self.slots.take_next(row_N, self.slots_RN[row_N, kept_B[next_B] - 1])
        taken_B, row_N = next_B[is_taken_N], row_N[is_taken_N]
        self.slots_RN[row_N, kept_B[taken_B]] = slot_N[is_taken_N]
        self.positions_RN[row_N, kept_B[taken_B]] = seen_B[taken_B]
        self.num_kept_R[row_N] += 1
        self.num_seen_R[row_N] += 1
        for b in np.flatnonzero(length_B > self.num_seen_R[row_B]).tolist():
            self.extend(int(row_B[b]), int(length_B[b]))

    def evict(self, row: int, is_kept_N: NDArray[np.bool_]) -> int:
        """Drops the row's entries that are not kept; the others close ranks in their order.

        A slot that nobody else refers to is free at once.

        Args:
            row: in use.
            is_kept_N: one per entry.

        Returns:
            How many the row dropped.
        """
        kept = int(self.num_kept_R[row])
        assert is_kept_N.shape == (kept,), "one answer per entry"
        left = int(is_kept_N.sum())
        self.slots.leave(self.slots_RN[row, :kept][~is_kept_N])
        for entries_RN in (self.slots_RN, self.positions_RN):
            entries_RN[row, :left] = entries_RN[row, :kept][is_kept_N]
        self.num_kept_R[row] = left
        self.num_changes_R[row] += 1
        return kept - left

    def convert(self, row: int, is_chosen_N: NDArray[np.bool_]) -> Moves:
        """Moves chosen entries of a row to int8 slots; those that are there stay. They count as they did before.

        Args:
            row: in use; it shares none of the chosen slots.
            is_chosen_N: one per entry.

        Returns:
            What the caller must quantise and move.
        """
        slots_N = self.slots_RN[row, : self.num_kept_R[row]]
        chosen = np.flatnonzero(is_chosen_N & (slots_N < self.slots.first_int8))
        before = slots_N[chosen].copy()
        self.slots.leave(before)
        after = self.slots.take_int8(len(chosen))
        slots_N[chosen] = after
        self.num_changes_R[row] += 1
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
        assert not self.num_kept_R[row] and len(positions_N) <= self.slots.free
        if len(positions_N):
            self._append(row, self.slots.take(row, NOBODY, len(positions_N)), positions_N)
        self.num_seen_R[row] = num_seen
        if self.slots.first == 0 and is_int8_N.any():
            self.convert(row, is_int8_N)

    def adopt(
        self, row: int, slots_N: SlotArray, positions_N: NDArray[np.int64], num_seen: int
    ) -> None:
        """Lets a fresh row use entries that a prefix holds; arguments as in ``restore``."""
        assert not self.num_kept_R[row], "only a fresh row adopts entries"
        self.slots.use(slots_N)
        self._append(row, slots_N, positions_N)
        self.num_seen_R[row] = self.num_adopted_R[row] = num_seen

    def close_ranks(self) -> Moves:
        """Moves all entries to the first slots of their form, row by row, so that other memory can be given back.

        Promises lapse. The caller moves what the slots hold; those behind the moved ones are untouched.
        """
        held = self._held()
        moves = self.slots.close_ranks(np.concatenate(held))
        for slots_N in held:
            moves.renumber(slots_N)
        return moves

    def release(self, row: int) -> None:
        """The row uses nothing any more, and nothing is kept for it."""
        self.slots.leave(self.slots_RN[row, : self.num_kept_R[row]])
        self.slots.forget_promises(row)
        self.num_kept_R[row] = self.num_seen_R[row] = self.num_adopted_R[row] = 0
        self.num_changes_R[row] += 1

    def check_integrity(self, held_N: SlotArray) -> None:
        """Asserts all counts from scratch; ``held_N``: each reference of a cached prefix once."""
        held = self._held()
        self.slots.check_integrity(np.concatenate(held), held_N)
        for row, slots_N in enumerate(held):
            assert len(np.unique(slots_N)) == len(slots_N), f"row {row} has a slot twice"
            positions_N = self.positions_RN[row, : len(slots_N)]
            assert (np.diff(positions_N, prepend=-1) > 0).all(), f"row {row}: positions disordered"
            seen = self.num_seen_R[row]
            assert not len(slots_N) or positions_N[-1] < seen, f"row {row}: an entry not seen yet"

    def _held(self) -> list[SlotArray]:
        return [self.slots_RN[row, :kept] for row, kept in enumerate(self.num_kept_R)]

    def _append(self, row: int, slots_N: SlotArray, positions_N: NDArray[np.int64]) -> None:
        """Entries behind those that the row has."""
        kept = int(self.num_kept_R[row])
        new = slice(kept, kept + len(slots_N))
        self.slots_RN[row, new] = slots_N
        self.positions_RN[row, new] = positions_N
        self.num_kept_R[row] = new.stop
