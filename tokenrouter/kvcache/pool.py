"""Which requests have memory. The pool hands out rows; a slot table per layer group says which slots a row has.

A slot holds one token; a request's slots need not be neighbours, but are where possible. A slot of a group names the
rows of that group's layers in the arena, so all groups number their slots alike and share one arena, and a request may
have other slots, and keep other tokens, in every group.

R rows (requests), N tokens of a row.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenrouter.kvcache.moves import Moves
from tokenrouter.kvcache.slots import SlotArray, Slots
from tokenrouter.kvcache.stretch import Prefix
from tokenrouter.kvcache.table import SlotTable

SLACK_PER_ROW = 64
"""Slots that are freed beyond what is wanted, for each row: rows then get runs, and nobody asks again soon."""


class HeldPrefixes(Protocol):
    """Cached prefixes, as the pool sees them."""

    def drop_until_free(self, num_slots: int) -> None:
        """Lets go of prefixes until every group has ``num_slots`` free; the pool knows that it can have them."""

    def held(self, group: int) -> list[SlotArray]:
        """The slots in one group that each prefix holds."""

    def renumber(self, group: int, moves: Moves) -> None:
        """The entries of a group have moved."""


class KVPool:
    """Rows, and a slot table for each layer group.

    Every call acts on all groups or on none. Counts are of the scarcest group, the one with the fewest free slots: a
    request fits when it fits there, and free + live + cached == num_slots holds for it as for every other
    (``check_integrity``).

    Attributes:
        num_slots: slots of every group.
        max_rows: requests that can be admitted at once.
        max_len: tokens that a row can hold.
        slots_for: the most slots that a request of so many tokens holds at once.
        tables: one per layer group, by the group's number.
        prefixes: what holds slots beside the rows; None: nothing does.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_rows: int,
        max_len: int,
        num_groups: int = 1,
        slots_for: Callable[[int], int] | None = None,
        first_slot: int = 0,
        num_int8: int = 0,
    ) -> None:
        """Builds an empty pool.

        Args:
            num_slots: tokens that every layer of the arena holds.
            max_rows: requests that can be admitted at once.
            max_len: tokens that a request can grow to.
            num_groups: layer groups.
            slots_for: the most slots that a request of so many tokens holds at once, in any group; None: one per token.
            first_slot: number of the first slot for new tokens; see SlotTable.
            num_int8: slots behind the null slot, for entries that are converted later.

        Raises:
            ValueError: a size below 1.
        """
        sizes = num_slots, max_rows, max_len, num_groups
        if min(sizes) < 1:
            raise ValueError(
                "a pool needs at least 1 slot, row, token of length and layer group; got "
                + ", ".join(map(str, sizes))
            )
        self.num_slots = num_slots
        self.max_rows = max_rows
        self.max_len = max_len
        self.slots_for = slots_for or int
        self.tables: tuple[SlotTable, ...] = tuple(
            SlotTable(
                num_slots=num_slots,
                max_rows=max_rows,
                max_len=max_len,
                first_slot=first_slot,
                num_int8=num_int8,
            )
            for _ in range(num_groups)
        )
        self.prefixes: HeldPrefixes | None = None
        self._free_rows = list(range(max_rows - 1, -1, -1))

    @property
    def free(self) -> int:
        """Slots that nobody refers to, in the scarcest group."""
        return self._scarcest.free

    @property
    def cached(self) -> int:
        """Slots that cached prefixes hold, in the scarcest group; rows may use them too."""
        return self._scarcest.cached

    @property
    def live(self) -> int:
        """Slots that only requests refer to, in the scarcest group."""
        return self.num_slots - self.free - self.cached

    @property
    def used(self) -> int:
        """Slots that some request uses, in the group with most of them."""
        return max(table.slots.used for table in self.tables)

    @property
    def available(self) -> int:
        """Slots that a request can still get: free ones, and those of prefixes that no request uses."""
        return self.num_slots - self.used

    @property
    def seen(self) -> int:
        """Tokens that got a slot in the requests that are there now; evicted ones count, shared ones once at most."""
        table = self.tables[0]
        return max(int((table.num_seen_R - table.num_adopted_R).sum()), self.used)

    @property
    def converted(self) -> int:
        """Entries that were converted to int8, in the group with most of them."""
        return max(table.slots.converted for table in self.tables)

    @property
    def peak_used(self) -> int:
        """The most slots of any one group that requests used at once."""
        return max(table.slots.peak_used for table in self.tables)

    @property
    def num_touched(self) -> int:
        """Slots of any one group whose memory is in use, be they free or not."""
        return max(table.slots.num_touched for table in self.tables)

    def touched_bytes(self, full_bytes: int, int8_bytes: int) -> int:
        """Memory that is in use, mean over groups, where a slot of all layers has so many bytes in each form."""
        slots = [table.slots for table in self.tables]
        counts = [(s.num_touched, s.num_touched_int8) for s in slots]
        return _mean_bytes(counts, full_bytes, int8_bytes)

    def used_bytes(self, full_bytes: int, int8_bytes: int) -> int:
        """What the entries of requests take, mean over groups; arguments as in ``touched_bytes``."""
        counts = [(table.slots.used, table.slots.converted) for table in self.tables]
        return _mean_bytes(counts, full_bytes, int8_bytes)

    @property
    def num_free_rows(self) -> int:
        """Requests that can still be admitted."""
        return len(self._free_rows)

    def acquire_row(self, expected_len: int) -> int:
        """Takes a row for a request that may grow to ``expected_len`` tokens; its slots come with ``extend``.

        Raises:
            ValueError: all rows are taken.
        """
        if not self._free_rows:
            raise ValueError("no free row in the KV pool")
        row = self._free_rows.pop()
        for table in self.tables:
            table.promise(row, self.slots_for(expected_len))
        return row

    def extend(self, row: int, length: int) -> bool:
        """Gives ``row`` slots up to its first ``length`` tokens in every group; those evicted since stay so.

        Cached prefixes that no request uses make way.

        Returns:
            False, and no row changed, when a group has too few slots or a row cannot get so long.
        """
        wanted = length - int(self.tables[0].num_seen_R[row])
        if length > self.max_len or not self.make_free(wanted):
            return False
        for table in self.tables:
            table.extend(row, length)
        return True

    def extend_all(self, row_B: SlotArray, length_B: SlotArray) -> bool:
        """``extend`` for different rows at once, where free slots suffice for all: no cached prefix makes way.

        Returns:
            False, and no row changed, where they do not, or a row cannot get so long.
        """
        wanted_B = np.maximum(length_B - self.tables[0].num_seen_R[row_B], 0)
        if int(wanted_B.sum()) > self.free or int(length_B.max(initial=0)) > self.max_len:
            return False
        for table in self.tables:
            table.extend_all(row_B, length_B)
        return True

    def adopt(self, row: int, prefix: Prefix) -> None:
        """Lets a fresh row use the entries of a cached prefix, in every group."""
        for group, table in enumerate(self.tables):
            table.adopt(row, prefix.slots(group), prefix.positions(group), prefix.num_tokens)

    def has_room(self, num_slots: int, prefix: Prefix | None = None) -> bool:
        """Whether a fresh row can get ``num_slots`` in every group, those of a cached prefix among them."""
        for group, table in enumerate(self.tables):
            wanted, available = num_slots, self.num_slots - table.slots.used
            if prefix is not None:
                slots_N = prefix.slots(group)
                wanted -= len(slots_N)
                available -= table.slots.num_idle(slots_N)
            if wanted > available:
                return False
        return True

    def make_free(self, num_slots: int) -> bool:
        """Drops cached prefixes until ``num_slots`` are free in every group; False, and none dropped, if too few."""
        if self.free < num_slots:
            if self.prefixes is None or self.available < num_slots:
                return False
            slack = min(SLACK_PER_ROW * self.max_rows, self.num_slots // 16)
            self.prefixes.drop_until_free(min(num_slots + slack, self.available))
        return self.free >= num_slots

    def evict(self, row: int, group: int, is_kept_N: NDArray[np.bool_]) -> int:
        """Drops entries of a row in one group; a slot that nobody else refers to is free at once.

        Args:
            row: in use.
            group: number of the layer group.
            is_kept_N: one per entry that the row has there, oldest first.

        Returns:
            How many the row dropped.
        """
        return self.tables[group].evict(row, is_kept_N)

    def release(self, row: int) -> None:
        """Frees a row and its slots in every group at once.

        Raises:
            ValueError: the row is not in use.
        """
        if row in self._free_rows:
            raise ValueError(f"row {row} is not in use")
        for table in self.tables:
            table.release(row)
        self._free_rows.append(row)

    def check_integrity(self) -> None:
        """Asserts the invariant of every group from scratch, and that free rows hold nothing."""
        for group, table in enumerate(self.tables):
            held = [] if self.prefixes is None else self.prefixes.held(group)
            table.check_integrity(np.concatenate([np.zeros(0, np.int64), *held]))
            assert not table.num_kept_R[self._free_rows].any(), "a free row holds slots"

    @property
    def _scarcest(self) -> Slots:
        return min((table.slots for table in self.tables), key=lambda slots: slots.free)


def _mean_bytes(counts: Sequence[tuple[int, int]], full_bytes: int, int8_bytes: int) -> int:
    """Of slots in both forms, mean over groups; ``counts``: per group all slots, and those of them in int8."""
    return sum((n - k) * full_bytes + k * int8_bytes for n, k in counts) // len(counts)
