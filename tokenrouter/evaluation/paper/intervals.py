"""What repeated runs say of a number, and whether two numbers differ."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

Verdict = Literal["better", "worse", "tie"]
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t, two-sided 95 %, for 1 to 10 degrees of freedom."""
NORMAL_95 = 1.95996
RANGES_APART = {2: 1.72, 3: 0.69}
"""By the number of passes what two medians must differ by, in sums of the two ranges, so that luck alone parts them in
5 of 100 cases (simulated, normal; after Lord 1947). From 4 passes on ranges that do not overlap say as much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One run's number.

    Attributes:
        value: what it measured.
        low, high: smallest and largest of its passes, or 95 % of its windows of text or its questions; NaN: unknown.
        num_passes: that ``low`` and ``high`` are of; 0: they are of windows, the same in all repeats.
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    num_passes: int = 0

    @property
    def text_half(self) -> float:
        """Half of what windows leave open, which no repeat makes less; 0 where nothing is known of that."""
        half = (self.high - self.low) / 2
        return half if not self.num_passes and math.isfinite(half) else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A number over runs.

    Attributes:
        value: mean over runs.
        low, high: 95 % of Student's t over two runs and more, with what their windows of text leave open; of one run,
            its own; NaN where that is unknown.
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

    @property
    def text_half(self) -> float:
        """Half of what windows of text leave open, the same in all runs."""
        return fmean(sample.text_half for sample in self.samples)


def estimate(samples: Sequence[Sample]) -> Estimate:
    """The mean of at least one run with its interval."""
    if not samples:
        raise ValueError("an estimate needs at least one run, got none")
    values = [sample.value for sample in samples]
    value = fmean(values)
    if len(values) == 1:
        low, high = samples[0].low, samples[0].high
    else:
        text = fmean(sample.text_half for sample in samples)
        half = math.hypot(_t_half(values), text)
        low, high = value - half, value + half
    return Estimate(value=value, low=low, high=high, samples=tuple(samples))


def verdict(own: Estimate, other: Estimate, better: Literal["more", "less"]) -> Verdict | None:
    """What ``own`` is beside ``other``.

    Over several runs the differences of runs in the same place are looked at, since these shared a machine and a seed;
    of one run each, the two intervals. What windows of text leave open counts in both cases.

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
        within = math.hypot(
            _t_half([a.value - b.value for a, b in pairs]), own.text_half, other.text_half
        )
    elif own.is_bounded and other.is_bounded:
        within = _unpaired(own, other)
    else:
        return None
    if abs(difference) <= within:
        return "tie"
    return "better" if (difference > 0) == (better == "more") else "worse"


def t_95(degrees: int) -> float:
    """Student's t, two-sided 95 %: of a table, beyond it by Cornish and Fisher's expansion (1938), to 0.003."""
    if degrees <= len(T_95):
        return T_95[degrees - 1]
    z = NORMAL_95
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def _unpaired(own: Estimate, other: Estimate) -> float:
    """What two intervals leave between their values."""
    if not any(sample.num_passes for sample in (*own.samples, *other.samples)):
        return math.hypot(own.high - own.low, other.high - other.low) / 2
    lower, upper = sorted((own, other), key=lambda each: each.value)
    overlap = (lower.high - lower.value) + (upper.value - upper.low)
    fewest = min(sample.num_passes for sample in (*own.samples, *other.samples))
    ranges = (own.high - own.low) + (other.high - other.low)
    return max(overlap, RANGES_APART.get(fewest, 0.0) * ranges)


def _t_half(values: Sequence[float]) -> float:
    return t_95(len(values) - 1) * stdev(values) / math.sqrt(len(values))
