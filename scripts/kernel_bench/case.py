"""One operator at one size: its calls on every implementation, and what they took beside the roofline."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from math import ceil
from typing import Any

from tokenrouter.evaluation.ratios import speed_ratio, take_turns
from tokenrouter.telemetry import Spread, spread

from .roofline import Machine, Roofline, Work

Call = Callable[[], Any]
NATIVE, REFERENCE, LIBRARY, SEPARATE = "native", "reference", "library", "separate"


class Turn:
    """Seconds per call of ``calls``, which take turns: every turn goes on where the last one stopped.

    Args:
        calls: the same work on other memory each, at least one.
        turn_s: a turn lasts about as long, at least one call.
    """

    def __init__(self, calls: Sequence[Call], turn_s: float) -> None:
        self._calls = cycle(calls)
        self.num_calls = 1
        self()
        self.num_calls = max(1, ceil(turn_s / self()))

    def __call__(self) -> float:
        started = time.perf_counter()
        for call in islice(self._calls, self.num_calls):
            call()
        return (time.perf_counter() - started) / self.num_calls


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Implementations of the same work.

    Attributes:
        operator: of KernelSet.
        size: rows, features, keys, in words.
        work: of one call.
        calls: per implementation one call per copy of the weights or the KV entries; ``native`` among them.
    """

    operator: str
    size: str
    work: Work
    calls: Mapping[str, Sequence[Call]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A measured case.

    Attributes:
        operator: of KernelSet.
        size: in words.
        seconds: per call, by implementation.
        speedups: how many times as fast native is as each other implementation, turn by turn.
        roofline: of the same work.
    """

    operator: str
    size: str
    seconds: Mapping[str, Spread]
    speedups: Mapping[str, Spread]
    roofline: Roofline

    @property
    def roofline_frac(self) -> float:
        """The share of the roofline that native reaches."""
        return self.roofline.seconds / self.seconds[NATIVE].median

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, times in microseconds, for JSON."""
        return {
            "operator": self.operator,
            "size": self.size,
            "us": {name: _rounded(value, 1e6) for name, value in self.seconds.items()},
            "native_speedup_vs": {name: _rounded(value) for name, value in self.speedups.items()},
            "roofline_us": float(f"{self.roofline.seconds * 1e6:.5g}"),
            "bound": self.roofline.bound,
            "native_roofline_frac": float(f"{self.roofline_frac:.4g}"),
        }


def measure(case: Case, machine: Machine, *, turn_s: float, repeats: int) -> Result:
    """Lets the implementations take turns, after one turn that does not count."""
    runs = {name: Turn(calls, turn_s) for name, calls in case.calls.items()}
    seconds = take_turns(runs, repeats, title=f"{case.operator}, {case.size}")
    return Result(
        operator=case.operator,
        size=case.size,
        seconds={name: spread(values) for name, values in seconds.items()},
        speedups={name: speed_ratio(seconds, NATIVE, name) for name in seconds if name != NATIVE},
        roofline=machine.roofline(case.work),
    )


def _rounded(value: Spread, by: float = 1.0) -> dict[str, float]:
    return {key: float(f"{each * by:.5g}") for key, each in asdict(value).items()}
