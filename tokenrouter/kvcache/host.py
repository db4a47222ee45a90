"""The host tier: what preempted requests had in the arena, until they get slots again, bit for bit.

A preempted request is copied, or left to be computed again, whichever is estimated to cost less::

    swap_s(mean over layers of its entries)  <=  num_seen * recompute_s

The left side is a gather out of the arena and a scatter back into it, timed when the tier is built: under load a
swap takes up to twice as long, as it finds nothing in the caches. The right side counts evicted tokens, too, as a
recompute runs them again, and leaves attention and cached prefixes out. So the choice is sure where the sides differ by
more than twice; ``scripts/bench_swap.py`` measures both.

N entries of one request in one layer group.
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

SAMPLE_LAYERS = 2
FEW_ENTRIES, MANY_ENTRIES = 16, 512
SAMPLE_BYTES = 1 << 19  # of a layer's entries: enough for new memory, and a few milliseconds in all
SAMPLE_REPEATS = 3


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
        num_bytes: of its keys, values and scales, all layers.
    """

    num_seen: int
    num_entries: int
    num_bytes: int
    groups: tuple[SwappedGroup, ...]


@dataclass(slots=True)
class SwapCounts:
    """What a host tier did since its counters were last reset.

    Attributes:
        num_out: requests whose entries were copied out; every other preemption lost them.
        num_in: requests that got them back; those that ended while they waited did not.
        copy_s: seconds in both directions.
        peak_entries: most entries held at once.
        peak_bytes: most bytes held at once.
    """

    num_out: int = 0
    num_in: int = 0
    copy_s: float = 0.0
    peak_entries: int = 0
    peak_bytes: int = 0

    def reset(self) -> None:
        """Back to zero; what the tier holds counts again in the peaks with the next request that comes."""
        self.num_out, self.num_in, self.copy_s = 0, 0, 0.0
        self.peak_entries, self.peak_bytes = 0, 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapCost:
    """Seconds to copy a request out and back: ``fixed_s + entries * entry_s``."""

    fixed_s: float
    entry_s: float

    def seconds(self, num_entries: float) -> float:
        """Of a request with so many entries in every layer."""
        return self.fixed_s + num_entries * self.entry_s


class HostTier:
    """Room for ``num_slots`` entries; free + live == num_slots after every call.

    Args:
        pool, arena: where entries come from and go back to.
        layer_groups: per layer the number of its group.
        num_slots: entries of all layers that it may hold, at least 1.
        recompute_s: what computing one token again costs, in seconds; infinite: every request is copied that there is
            room for.

    Attributes:
        counts: what it did.
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
        self.counts = SwapCounts()
        self._live_bytes = 0
        self._recompute_s = recompute_s
        self._cost = measure_swap(arena)

    @property
    def live(self) -> int:
        """Entries that it holds."""
        return self.num_slots - self.free

    @property
    def peak_live(self) -> int:
        """Most entries that it held at once."""
        return self.counts.peak_entries

    @property
    def recompute_s(self) -> float:
        """Seconds of computing one token again, as the choice has them; may be set between two steps."""
        return self._recompute_s

    @recompute_s.setter
    def recompute_s(self, seconds: float) -> None:
        self._recompute_s = seconds

    def swap_s(self, num_entries: float) -> float:
        """Estimated seconds of copying a request with so many entries, mean over layers, out and back."""
        return self._cost.seconds(num_entries)

    def swap_out(self, row: int, num_seen: int) -> Swapped | None:
        """Copies the entries of a row's first ``num_seen`` tokens and releases the row.

        Returns:
            None, and nothing changed, where there is too little room or a copy costs more than a recompute.
        """
        kept = [int(table.num_kept_R[row]) for table in self._pool.tables]
        if max(kept) > self.free or self._is_dearer(kept, num_seen):
            return None
        started = time.perf_counter()
        groups = tuple(self._copy(group, row, num_seen) for group in range(len(self._layers)))
        swapped = Swapped(
            num_seen=num_seen,
            num_entries=max(len(group.positions_N) for group in groups),
            num_bytes=sum(map(_num_bytes, groups)),
            groups=groups,
        )
        self._pool.release(row)
        self.free -= swapped.num_entries
        self._live_bytes += swapped.num_bytes
        counts = self.counts
        counts.num_out += 1
        counts.copy_s += time.perf_counter() - started
        counts.peak_entries = max(counts.peak_entries, self.live)
        counts.peak_bytes = max(counts.peak_bytes, self._live_bytes)
        return swapped

    def swap_in(self, swapped: Swapped, row: int) -> None:
        """Gives a fresh row the entries back; the pool must have room for them, where cached prefixes make way."""
        started = time.perf_counter()
        has_room = self._pool.make_free(swapped.num_entries)
        assert has_room, "the pool lacks slots that it had counted as available"
        for group, (table, held) in enumerate(zip(self._pool.tables, swapped.groups, strict=True)):
            table.restore(row, held.positions_N, swapped.num_seen, held.is_int8_N)
            slots_N = torch.from_numpy(table.slots_RN[row, : len(held.positions_N)].copy())
            is_int8_N = torch.from_numpy(held.is_int8_N)
            for index, layer in enumerate(self._layers[group]):
                self._arena.write(layer, slots_N, is_int8_N, held.full[index], held.int8[index])
        self.drop(swapped)
        self.counts.num_in += 1
        self.counts.copy_s += time.perf_counter() - started

    def drop(self, swapped: Swapped) -> None:
        """The request has ended, or has its entries back."""
        self.free += swapped.num_entries
        self._live_bytes -= swapped.num_bytes

    def _is_dearer(self, kept: Sequence[int], num_seen: int) -> bool:
        """Whether copying costs more than computing again; ``kept``: entries per layer group."""
        copied = sum(n * len(layers) for n, layers in zip(kept, self._layers, strict=True))
        mean_entries = copied / sum(map(len, self._layers))
        return self.swap_s(mean_entries) > num_seen * self._recompute_s

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


def measure_swap(arena: KVArena) -> SwapCost:
    """Times what a swap does, with few entries and with more, on a small arena of the same form.

    Each time is the fastest of a few. Copies are kept until the end, as the tier keeps them: memory that is new costs
    more than memory that was just freed.
    """
    num_layers = min(SAMPLE_LAYERS, len(arena.layers))
    num_bytes = arena.int8_bytes_per_slot if arena.is_all_int8 else arena.bytes_per_slot
    fitting = SAMPLE_BYTES * len(arena.layers) // num_bytes
    many = min(max(fitting, 2 * FEW_ENTRIES), MANY_ENTRIES)
    scratch = arena.small_copy(num_layers, many)
    first = scratch.null_slot + 1 if arena.is_all_int8 else 0
    held: list[tuple[Tensor, Int8Entries]] = []
    few_s, many_s = (
        min(
            _swap_s(scratch, torch.arange(first, first + num_entries), held)
            for _ in range(SAMPLE_REPEATS)
        )
        for num_entries in (FEW_ENTRIES, many)
    )
    scale = len(arena.layers) / num_layers
    entry_s = max(many_s - few_s, 0.0) / (many - FEW_ENTRIES)
    fixed_s = max(few_s - FEW_ENTRIES * entry_s, 0.0)
    return SwapCost(fixed_s=fixed_s * scale, entry_s=entry_s * scale)


def _swap_s(arena: KVArena, slots_N: Tensor, held: list[tuple[Tensor, Int8Entries]]) -> float:
    started = time.perf_counter()
    is_int8_N = arena.is_int8(slots_N)
    for layer in range(len(arena.layers)):
        held.append(arena.read(layer, slots_N))
        arena.write(layer, slots_N, is_int8_N, *held[-1])
    return time.perf_counter() - started


def _num_bytes(group: SwappedGroup) -> int:
    return sum(t.nbytes for t in group.full) + sum(t.nbytes for part in group.int8 for t in part)
