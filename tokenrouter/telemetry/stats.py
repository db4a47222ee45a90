"""Percentiles and spreads: the two ways in which a run reports many values as few."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np


def percentiles(values: Iterable[float]) -> dict[str, float] | None:
    """Mean, p50, p90 and p99 (linear interpolation between ranks); None where there is no value."""
    array = np.fromiter(values, dtype=np.float64)
    if array.size == 0:
        return None
    p50, p90, p99 = np.percentile(array, (50, 90, 99))
    return {"mean": float(array.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The median of repeated measurements with the smallest and the largest of them."""

    median: float
    min: float
    max: float


def spread(values: Sequence[float]) -> Spread:
    """Median, minimum and maximum of at least one value."""
    if not values:
        raise ValueError("spread needs at least one value, got none")
    return Spread(median=float(median(values)), min=float(min(values)), max=float(max(values)))
