"""The slots of one layer group: which are in use and by how many, and who takes the free ones.

Neighbouring slots are read fastest by attention, and a token that takes the next neighbour costs no search. So a new
row starts where a free run as long as it may become begins, its fair share of the pool at most, and the run is kept for
it softly: others take those slots only when nothing else is free. A row that cannot go on gets another run.

N slots of one call, all different; S all slots.
"""

import numpy as np
from numpy.typing import NDArray

from tokenrouter.kvcache.moves import Moves

NOBODY = -1
NEXT_RUN = 256  # slots that are kept for a row whose first run is used up

SlotArray = NDArray[np.int64]


class Slots:
    """Reference counts. A slot is free when no row and no cached prefix refers to it.

    New tokens get slots ``first`` to ``end - 1``. The null slot is ``end``, and behind it, from ``first_int8`` on, lie
    slots for entries that are converted to int8 later.

    Attributes:
        num_slots: slots for new tokens, and the most entries at once, of both forms.
        max_rows: rows at once.
        free: entries that there is still room for.
        cached: slots that cached prefixes hold, whether rows use them or not.
        idle: those of them that no row uses: they can be had by dropping prefixes.
        converted: entries in int8 slots behind the null slot.
        peak_used: the most slots at once that some row used.
        num_touched: slots that were ever taken since their memory was last given back: what the arena's pages hold.
        num_touched_int8: those of them behind the null slot.
    """

    def __init__(self, *, num_slots: int, max_rows: int, first: int, num_int8: int) -> None:
        self.num_slots = num_slots
        self.max_rows = max_rows
        self.first = first
        self.end = first + num_slots
        self.first_int8 = self.end + 1
        size = self.first_int8 + num_int8
        self._users_S: NDArray[np.int32] = np.zeros(size, np.int32)  # rows and prefixes
        self._held_S: NDArray[np.int32] = np.zeros(size, np.int32)  # prefixes alone
        self._promised_S: NDArray[np.int32] = np.full(size, NOBODY, np.int32)
        self._touched_S: NDArray[np.bool_] = np.zeros(size, np.bool_)
        self.free = num_slots
        self.cached = 0
        self.idle = 0
        self.converted = 0
        self.peak_used = 0
        self.num_touched = 0
        self.num_touched_int8 = 0

    @property
    def used(self) -> int:
        """Slots that some row uses."""
        return self.num_slots - self.free - self.idle

    def promise(self, row: int, wanted: int) -> None:
        """Marks the first free, unpromised run of ``wanted`` slots for ``row``; none, none marked."""
        starts, ends = self._open_runs()
        fits = np.flatnonzero(ends - starts >= wanted)
        if len(fits):
            start = int(starts[fits[0]])
            self._promised_S[start : start + wanted] = row

    def forget_promises(self, row: int) -> None:
        """What was kept for ``row`` is anybody's."""
        self._promised_S[self._promised_S == row] = NOBODY

    def take_next(self, row_B: SlotArray, last_B: SlotArray) -> tuple[SlotArray, NDArray[np.bool_]]:
        """The neighbours behind slots ``last_B``, now the rows', where they are free and nobody else's.

        Returns:
            The neighbours, and which of them were taken. Of rows with one and the same neighbour one gets it.
        """
        slot_B = np.minimum(last_B + 1, self.end)  # the null slot: none
        is_taken_B = (slot_B < self.end) & (self._users_S[slot_B] == 0)
        promised_B = self._promised_S[slot_B]
        is_taken_B &= (promised_B == row_B) | (promised_B == NOBODY)
        taken = np.flatnonzero(is_taken_B)
        slots, first = np.unique(slot_B[taken], return_index=True)
        if len(slots) < len(taken):
            is_taken_B[:] = False
            is_taken_B[taken[first]] = True
        self._users_S[slots] = 1
        self.num_touched += int((~self._touched_S[slots]).sum())
        self._touched_S[slots] = True
        self._count_taken(len(slots))
        return slot_B, is_taken_B

    def take(self, row: int, last: int, wanted: int) -> SlotArray:
        """Free slots for a row's next tokens, now the row's: neighbours of ``last``, promised (a new run), any.

        Args:
            row: in use.
            last: the slot of its newest entry, NOBODY where it has none.
            wanted: at most ``free``.
        """
        found = self._choose(row, last, wanted)
        self.use(found)
        return found

    def take_int8(self, wanted: int) -> SlotArray:
        """Free slots behind the null slot, now in use."""
        free = np.flatnonzero(self._users_S[self.first_int8 :] == 0)[:wanted]
        assert len(free) == wanted, "fewer int8 slots than slots"
        found = self.first_int8 + free
        self.use(found)
        return found

    def use(self, slots_N: SlotArray) -> None:
        """One more row uses each of the slots, free ones or not."""
        before_N = self._users_S[slots_N]
        self.idle -= int(((before_N > 0) & (before_N == self._held_S[slots_N])).sum())
        self._users_S[slots_N] = before_N + 1
        fresh_N = slots_N[before_N == 0]
        untouched_N = fresh_N[~self._touched_S[fresh_N]]
        self.num_touched += len(untouched_N)
        self.num_touched_int8 += int((untouched_N >= self.first_int8).sum())
        self._touched_S[untouched_N] = True
        self.converted += int((fresh_N >= self.first_int8).sum())
        self._count_taken(len(fresh_N))

    def leave(self, slots_N: SlotArray) -> None:
        """One row less uses each of the slots; those that nobody refers to are free at once."""
        self._users_S[slots_N] -= 1
        users_N = self._users_S[slots_N]
        gone_N = slots_N[users_N == 0]
        self.idle += int((users_N == self._held_S[slots_N]).sum()) - len(gone_N)
        self._count_freed(gone_N)

    def hold(self, slots_N: SlotArray) -> None:
        """One more prefix holds each of the slots; rows or prefixes use them already."""
        self.cached += int((self._held_S[slots_N] == 0).sum())
        self._users_S[slots_N] += 1
        self._held_S[slots_N] += 1

    def let_go(self, slots_N: SlotArray) -> None:
        """One prefix less holds each of the slots."""
        self._users_S[slots_N] -= 1
        self._held_S[slots_N] -= 1
        self.cached -= int((self._held_S[slots_N] == 0).sum())
        gone_N = slots_N[self._users_S[slots_N] == 0]
        self.idle -= len(gone_N)
        self._count_freed(gone_N)

    def num_idle(self, slots_N: SlotArray) -> int:
        """How many of a prefix's slots no row uses."""
        return int((self._users_S[slots_N] == self._held_S[slots_N]).sum())

    def num_freed_by(self, slots_N: SlotArray) -> int:
        """How many slots ``let_go`` would free."""
        return int((self._users_S[slots_N] == 1).sum())

    def close_ranks(self, used_N: SlotArray) -> Moves:
        """Gives the slots in use the first numbers of their form, in the order of ``used_N``; promises lapse.

        Args:
            used_N: every slot that a row uses, in the wished order, repetitions allowed; cached ones follow.

        Returns:
            Old and new numbers, each slot once; the caller moves what they hold.
        """
        all_N = np.concatenate([used_N, np.flatnonzero(self._held_S)])
        before = all_N[np.sort(np.unique(all_N, return_index=True)[1])]
        is_int8 = before >= self.first_int8
        after = np.where(
            is_int8,
            self.first_int8 + np.cumsum(is_int8) - 1,
            self.first + np.cumsum(~is_int8) - 1,
        )
        for counts_S in (self._users_S, self._held_S):
            counts_N = counts_S[before]
            counts_S[:] = 0
            counts_S[after] = counts_N
        self._promised_S[:] = NOBODY
        self._touched_S[:] = False
        self._touched_S[after] = True
        self.num_touched, self.num_touched_int8 = len(after), int(is_int8.sum())
        return Moves(before, after)

    def check_integrity(self, rows_N: SlotArray, held_N: SlotArray) -> None:
        """Asserts every count from scratch; ``rows_N`` and ``held_N``: each reference of a row, or a prefix, once."""
        size = len(self._users_S)
        by_rows_S = np.bincount(rows_N, minlength=size)
        held_S = np.bincount(held_N, minlength=size)
        assert (self._held_S == held_S).all(), "references of prefixes miscounted"
        assert (self._users_S == by_rows_S + held_S).all(), "references of rows miscounted"
        in_use_S = self._users_S > 0
        assert self.free == self.num_slots - int(in_use_S.sum()), "free slots miscounted"
        assert self.cached == int((held_S > 0).sum()), "cached slots miscounted"
        assert self.idle == int(((held_S > 0) & (by_rows_S == 0)).sum()), "idle slots miscounted"
        assert self.converted == int(in_use_S[self.first_int8 :].sum()), "int8 entries miscounted"
        assert not in_use_S[self.end], "the null slot was handed out"
        assert self.num_touched == int(self._touched_S.sum()), "touched slots miscounted"
        num_int8 = int(self._touched_S[self.first_int8 :].sum())
        assert self.num_touched_int8 == num_int8, "touched int8 slots miscounted"
        assert self._touched_S[in_use_S].all(), "an entry in a slot that was never touched"

    def _choose(self, row: int, last: int, wanted: int) -> SlotArray:
        follow = last + 1
        if last != NOBODY and follow + wanted <= self.end:
            run = slice(follow, follow + wanted)
            promised = self._promised_S[run]
            is_open = (promised == row) | (promised == NOBODY)
            if is_open.all() and not self._users_S[run].any():
                return np.arange(follow, follow + wanted)
        if last != NOBODY and self._num_kept_for(row) < wanted:
            self._promise_next(row, max(wanted, min(NEXT_RUN, self.free // self.max_rows)))
        candidates = self.first + np.flatnonzero(self._users_S[self.first : self.end] == 0)
        promised = self._promised_S[candidates]
        rank = np.where(promised == row, 0, np.where(promised == NOBODY, 1, 2))
        return candidates[np.argsort(rank, kind="stable")[:wanted]]

    def _num_kept_for(self, row: int) -> int:
        """Promised slots that are free: a row that adopted a prefix has its first run still before it."""
        return int(np.count_nonzero((self._promised_S == row) & (self._users_S == 0)))

    def _promise_next(self, row: int, wanted: int) -> None:
        """A run for a row that cannot go on: of ``wanted`` slots, or the longest there is."""
        starts, ends = self._open_runs()
        if len(starts):
            lengths = np.minimum(ends - starts, wanted)
            best = int(lengths.argmax())
            start = int(starts[best])
            self._promised_S[start : start + int(lengths[best])] = row

    def _open_runs(self) -> tuple[SlotArray, SlotArray]:
        """First slots of the free, unpromised runs for new tokens, and the slots behind them."""
        new = slice(self.first, self.end)
        open_S = (self._users_S[new] == 0) & (self._promised_S[new] == NOBODY)
        edges = self.first + np.flatnonzero(np.diff(open_S, prepend=False, append=False))
        return edges[::2], edges[1::2]

    def _count_taken(self, num_fresh: int) -> None:
        self.free -= num_fresh
        self.peak_used = max(self.peak_used, self.used)

    def _count_freed(self, gone_N: SlotArray) -> None:
        self.free += len(gone_N)
        self.converted -= int((gone_N >= self.first_int8).sum())
