"""What repeated runs say of a number, and whether two numbers differ."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

Verdict = Literal["better", "worse", "tie"]
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t, two-sided 95 %, for 1 to 10 degrees of freedom."""
NORMAL_95 = 1.960


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One run's number.

    Attributes:
        value: what it measured.
        low, high: of its own passes or windows; NaN where it does not say.
    """

    value: float
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A number over runs.

    Attributes:
        value: mean over runs.
        low, high: 95 % of Student's t over two runs and more; of one run, what its passes or windows spread over; NaN
            where that is unknown.
        samples: of the runs, in their order.
    """

    value: float
    low: float
    high: float
    samples: tuple[Sample, ...]

    @property
    def is_bounded(self) -> bool:
        """Whether an interval is known."""
        return math.isfinite(self.low) and math.isfinite(self.high)


def estimate(samples: Sequence[Sample]) -> Estimate:
    """The mean of at least one run with its interval."""
    if not samples:
        raise ValueError("an estimate needs at least one run, got none")
    values = [sample.value for sample in samples]
    if len(values) == 1:
        low, high = samples[0].low, samples[0].high
    else:
        low, high = _t_interval(values)
    return Estimate(value=fmean(values), low=low, high=high, samples=tuple(samples))


def verdict(
    own: Estimate, other: Estimate, better: Literal["more", "less"]
) -> tuple[Verdict, float] | None:
    """What ``own`` is beside ``other``, and the difference of the two.

    Over several runs the differences of runs in the same place are looked at, since these shared a machine and a seed;
    of one run each, whether the two intervals overlap.

    Args:
        own: to be judged.
        other: what it is compared with.
        better: which way is up.

    Returns:
        None: one run each, and no interval is known.
    """
    difference = own.value - other.value
    if len(own.samples) == len(other.samples) > 1:
        pairs = zip(own.samples, other.samples, strict=True)
        low, high = _t_interval([a.value - b.value for a, b in pairs])
    elif own.is_bounded and other.is_bounded:
        low, high = own.low - other.high, own.high - other.low
    else:
        return None
    if low <= 0.0 <= high:
        return "tie", difference
    return ("better" if (difference > 0) == (better == "more") else "worse"), difference


def _t_interval(values: Sequence[float]) -> tuple[float, float]:
    count = len(values)
    t = T_95[count - 2] if count - 2 < len(T_95) else NORMAL_95
    half = t * stdev(values) / math.sqrt(count)
    return fmean(values) - half, fmean(values) + half
