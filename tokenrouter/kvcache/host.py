"""The host tier: what preempted requests had in the arena, until they get slots again, bit for bit.

L layers of a group, N entries of one request in one layer group, P planes, D head size.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenrouter.kernels import Int8Entries
from tokenrouter.kvcache.arena import KVArena
from tokenrouter.kvcache.pool import KVPool


@dataclass(frozen=True, kw_only=True, slots=True)
class SwappedGroup:
    """One layer group's entries: positions, which are int8, and per layer what the full and the int8 ones hold."""

    positions_N: NDArray[np.int64]
    is_int8_N: NDArray[np.bool_]
    full: tuple[Tensor, ...]
    int8: tuple[Int8Entries, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Swapped:
    """A request's entries outside the arena.

    Attributes:
        num_seen: its tokens with KV, evicted ones included.
        num_entries: in the group that has most.
    """

    num_seen: int
    num_entries: int
    groups: tuple[SwappedGroup, ...]


class HostTier:
    """Room for ``num_slots`` entries; free + live == num_slots after every call.

    Args:
        pool, arena: where entries come from and go back to.
        layer_groups: per layer the number of its group.
        num_slots: entries of all layers that it may hold, at least 1.
        recompute_s: what computing one token again costs, in seconds: a request whose entries cost more to copy out and
            back, by a copy that is timed here, is left to be computed again.
    """

    def __init__(
        self,
        pool: KVPool,
        arena: KVArena,
        layer_groups: Sequence[int],
        num_slots: int,
        *,
        recompute_s: float = float("inf"),
    ) -> None:
        self._pool = pool
        self._arena = arena
        self._layers = [
            [layer for layer, of in enumerate(layer_groups) if of == group]
            for group in range(len(pool.tables))
        ]
        self.num_slots = num_slots
        self.free = num_slots
        self.peak_live = 0
        self._recompute_s = recompute_s
        num_bytes = arena.int8_bytes_per_slot if arena.is_all_int8 else arena.bytes_per_slot
        self._copy_s = _copy_s(num_bytes)

    @property
    def live(self) -> int:
        """Entries that it holds."""
        return self.num_slots - self.free

    def swap_out(self, row: int, num_seen: int) -> Swapped | None:
        """Copies the entries of a row's first ``num_seen`` tokens and releases the row.

        Returns:
            None, and nothing changed, where there is too little room or a copy costs more than a recompute.
        """
        kept = [int(table.num_kept_R[row]) for table in self._pool.tables]
        if max(kept) > self.free or 2 * max(kept) * self._copy_s > num_seen * self._recompute_s:
            return None
        groups = [self._copy(group, row, num_seen) for group in range(len(self._layers))]
        num_entries = max(len(group.positions_N) for group in groups)
        self._pool.release(row)
        self.free -= num_entries
        self.peak_live = max(self.peak_live, self.live)
        return Swapped(num_seen=num_seen, num_entries=num_entries, groups=tuple(groups))

    def swap_in(self, swapped: Swapped, row: int) -> None:
        """Gives a fresh row the entries back; the pool must have room for them, where cached prefixes make way."""
        has_room = self._pool.make_free(swapped.num_entries)
        assert has_room, "the pool lacks slots that it had counted as available"
        for group, (table, held) in enumerate(zip(self._pool.tables, swapped.groups, strict=True)):
            table.restore(row, held.positions_N, swapped.num_seen, held.is_int8_N)
            slots_N = torch.from_numpy(table.slots_RN[row, : len(held.positions_N)].copy())
            is_int8_N = torch.from_numpy(held.is_int8_N)
            for index, layer in enumerate(self._layers[group]):
                self._arena.write(layer, slots_N, is_int8_N, held.full[index], held.int8[index])
        self.drop(swapped)

    def drop(self, swapped: Swapped) -> None:
        """The request has ended, or has its entries back."""
        self.free += swapped.num_entries

    def _copy(self, group: int, row: int, num_seen: int) -> SwappedGroup:
        table = self._pool.tables[group]
        positions_N = table.positions_RN[row, : table.num_kept_R[row]]
        kept = int(np.searchsorted(positions_N, num_seen))
        slots_N = torch.from_numpy(table.slots_RN[row, :kept].copy())
        parts = [self._arena.read(layer, slots_N) for layer in self._layers[group]]
        return SwappedGroup(
            positions_N=positions_N[:kept].copy(),
            is_int8_N=self._arena.is_int8(slots_N).numpy(),
            full=tuple(full for full, _ in parts),
            int8=tuple(int8 for _, int8 in parts),
        )


def _copy_s(num_bytes: int) -> float:
    """Seconds that copying one entry takes: the fastest of a few copies of a thousand."""
    source = torch.zeros(1000 * num_bytes, dtype=torch.uint8)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        source.clone()
        best = min(best, time.perf_counter() - started)
    return best / 1000
