"""One request: copying its entries out and back against computing them again."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from tokenrouter.evaluation import ratios as timing
from tokenrouter.kvcache import HostTier, KVArena, KVPool
from tokenrouter.telemetry import Spread, spread

from .setup import BY_COST, NEVER, Bench, Load

HEADROOM = (
    4  # rows of the pool that a request is copied from: it does not get the memory that it had
)
COPIES_TITLE = (
    f"\n{'entries':<9}{'form':<6}{'out and in ms':>26}{'estimated':>11}{'recompute ms':>28}"
    f"{'estimated':>11}  choice"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """Milliseconds for one request of so many entries: measured, and as the choice has them."""

    num_entries: int
    form: str
    swap_ms: Spread
    recompute_ms: Spread
    estimated_swap_ms: float
    estimated_recompute_ms: float

    @property
    def swaps(self) -> bool:
        """What the estimates lead to."""
        return self.estimated_swap_ms <= self.estimated_recompute_ms

    @property
    def is_right(self) -> bool:
        """Whether that is the cheaper of both, by the measured medians."""
        return self.swaps == (self.swap_ms.median <= self.recompute_ms.median)

    def as_values(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "swaps": self.swaps, "is_right": self.is_right}


def copies(bench: Bench, load: Load, form: str) -> Copied:
    """Times both in turns, on memory that is in use."""
    systems = bench.systems(load, form)
    host = systems[BY_COST].engine.scheduler.host
    assert host is not None
    prompt = bench.ids[: load.context]
    seconds = timing.take_turns(
        {
            "swap": _swap(bench, load.context, form),
            "recompute": partial(timing.prefill_s, systems[NEVER], prompt),
        },
        bench.repeats,
        title=f"one request, {load.context} {form}",
    )
    return Copied(
        num_entries=load.context,
        form=form,
        swap_ms=spread([1e3 * s for s in seconds["swap"]]),
        recompute_ms=spread([1e3 * s for s in seconds["recompute"]]),
        estimated_swap_ms=1e3 * host.swap_s(load.context),
        estimated_recompute_ms=1e3 * load.context * host.recompute_s,
    )


def format_copied(copied: Copied) -> str:
    """A line under ``COPIES_TITLE``."""
    verdict = "" if copied.is_right else " (the other is cheaper)"
    return (
        f"{copied.num_entries:<9,}{copied.form:<6}{_ranged(copied.swap_ms):>26}"
        f"{copied.estimated_swap_ms:>11.2f}{_ranged(copied.recompute_ms):>28}"
        f"{copied.estimated_recompute_ms:>11.1f}  {'swap' if copied.swaps else 'recompute'}{verdict}"
    )


def _swap(bench: Bench, num_entries: int, form: str) -> Callable[[], float]:
    config, num_slots = bench.model.config, HEADROOM * num_entries
    is_int8 = form == "int8"
    pool = KVPool(
        num_slots=num_slots, max_rows=HEADROOM, max_len=num_entries, first_slot=int(is_int8)
    )
    arena = KVArena(
        num_layers=config.num_layers,
        num_slots=0 if is_int8 else num_slots,
        kv_planes=config.kv_planes,
        head_dim=config.head_dim,
        dtype=bench.model.dtype,
        num_int8=num_slots if is_int8 else 0,
    )
    for tensor in (arena.kv_LSPD, *(part for entries in arena.int8 or () for part in entries)):
        tensor.fill_(1)
    host = HostTier(pool, arena, (0,) * config.num_layers, num_entries)

    def swap_s() -> float:
        row = pool.acquire_row(num_entries)
        pool.extend(row, num_entries)
        started = time.perf_counter()
        swapped = host.swap_out(row, num_entries)
        assert swapped is not None
        row = pool.acquire_row(num_entries)
        host.swap_in(swapped, row)
        elapsed_s = time.perf_counter() - started
        pool.release(row)
        return elapsed_s

    return swap_s


def _ranged(value: Spread) -> str:
    return f"{value.median:.2f} [{value.min:.2f}, {value.max:.2f}]"
