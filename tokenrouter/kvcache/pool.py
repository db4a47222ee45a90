"""Who owns which slot. A slot holds one token; a request's slots need not be neighbours, but are where possible.

Neighbouring slots can be read in place by attention. So a new request starts where a free run as long as it may become
begins, and the run is kept for it softly: others take those slots only when nothing else is free.

B rows (requests), N tokens of a row, S slots.
"""

import numpy as np
from numpy.typing import NDArray

FREE = -1


class KVPool:
    """Slot table, positions and free list of the device pool.

    Invariant after every call: free + live + cached == total, and a slot belongs to one row at most
    (``check_integrity``). ``cached`` is 0 until prefix sharing exists.
    """

    def __init__(self, *, num_slots: int, max_rows: int, max_len: int) -> None:
        if min(num_slots, max_rows, max_len) < 1:
            raise ValueError(
                f"a pool needs slots, rows and a length, got {num_slots}, {max_rows}, {max_len}"
            )
        self.num_slots = num_slots
        self.max_len = max_len
        self.slots_BN: NDArray[np.int64] = np.zeros((max_rows, max_len), np.int64)
        self.positions_BN: NDArray[np.int64] = np.zeros((max_rows, max_len), np.int64)
        self.num_kept_B: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self._owner_S: NDArray[np.int32] = np.full(num_slots, FREE, np.int32)
        self._promised_S: NDArray[np.int32] = np.full(num_slots, FREE, np.int32)
        self._first_B: NDArray[np.int64] = np.full(max_rows, -1, np.int64)
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self.free = num_slots
        self.cached = 0
        self.peak_live = 0

    @property
    def live(self) -> int:
        """Slots that belong to a request."""
        return self.num_slots - self.free - self.cached

    @property
    def num_free_rows(self) -> int:
        """Requests that can still be admitted."""
        return len(self._free_rows)

    def acquire_row(self, expected_len: int) -> int:
        """Takes a row for a request that may grow to ``expected_len`` tokens; its slots come with ``extend``."""
        if not self._free_rows:
            raise ValueError("no free row in the KV pool")
        row = self._free_rows.pop()
        self._promise(row, expected_len)
        return row

    def extend(self, row: int, length: int) -> bool:
        """Gives ``row`` slots up to ``length`` tokens; False, and nothing changed, when the pool has too few."""
        kept = int(self.num_kept_B[row])
        wanted = length - kept
        if wanted <= 0:
            return True
        if wanted > self.free or length > self.max_len:
            return False
        found = self._take(row, kept, wanted)
        self.slots_BN[row, kept:length] = found
        self.positions_BN[row, kept:length] = np.arange(kept, length)
        first = int(found[0]) if kept == 0 else int(self._first_B[row])
        in_a_run = first >= 0 and found[0] == first + kept and (np.diff(found) == 1).all()
        self._first_B[row] = first if in_a_run else -1
        self._owner_S[found] = row
        self.num_kept_B[row] = length
        self.free -= wanted
        self.peak_live = max(self.peak_live, self.live)
        return True

    def release(self, row: int) -> None:
        """Frees a row and its slots at once."""
        slots_N = self.slots_BN[row, : self.num_kept_B[row]]
        if row in self._free_rows:
            raise ValueError(f"row {row} is not in use")
        self._owner_S[slots_N] = FREE
        self.free += len(slots_N)
        self._promised_S[self._promised_S == row] = FREE
        self.num_kept_B[row] = 0
        self._first_B[row] = -1
        self._free_rows.append(row)

    def first_slot(self, row: int) -> int:
        """The first slot when the row's slots are consecutive, else -1."""
        return int(self._first_B[row])

    def check_integrity(self) -> None:
        """Asserts the invariant from scratch."""
        used = [self.slots_BN[row, : self.num_kept_B[row]] for row in range(len(self.num_kept_B))]
        all_used = np.concatenate(used) if used else np.zeros(0, np.int64)
        assert len(np.unique(all_used)) == len(all_used), "a slot belongs to two requests"
        assert len(all_used) == self.live, "live slots and slot tables disagree"
        assert self.free + self.live + self.cached == self.num_slots, (
            "free + live + cached != total"
        )
        assert int((self._owner_S == FREE).sum()) == self.free, "owners and free count disagree"
        for row, slots_N in enumerate(used):
            assert (self._owner_S[slots_N] == row).all(), f"row {row} does not own its slots"
            assert row not in self._free_rows or not len(slots_N), f"free row {row} holds slots"

    def _promise(self, row: int, expected_len: int) -> None:
        """Marks the first free, unpromised run of ``expected_len`` slots for ``row``; none, none marked."""
        open_S = (self._owner_S == FREE) & (self._promised_S == FREE)
        edges = np.flatnonzero(np.diff(open_S, prepend=False, append=False))
        starts, ends = edges[::2], edges[1::2]
        fits = np.flatnonzero(ends - starts >= expected_len)
        if len(fits):
            start = int(starts[fits[0]])
            self._promised_S[start : start + expected_len] = row

    def _take(self, row: int, kept: int, wanted: int) -> NDArray[np.int64]:
        """Slots for the next ``wanted`` tokens: the row's next neighbours, its promise, unpromised, then any."""
        follow = int(self.slots_BN[row, kept - 1]) + 1 if kept else -1
        if kept and follow + wanted <= self.num_slots:
            run = slice(follow, follow + wanted)
            promised = self._promised_S[run]
            if (self._owner_S[run] == FREE).all() and (
                (promised == row) | (promised == FREE)
            ).all():
                return np.arange(follow, follow + wanted)
        free_S = self._owner_S == FREE
        rank_S = np.where(self._promised_S == row, 0, np.where(self._promised_S == FREE, 1, 2))
        candidates = np.flatnonzero(free_S)
        order = np.argsort(rank_S[candidates], kind="stable")[:wanted]
        return candidates[order]
