"""Entries that receive too little attention go."""

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tokenrouter.checks import check_number
from tokenrouter.kvcache.retention.base import Entries, RetentionPolicy


@dataclass(kw_only=True)
class Threshold(RetentionPolicy):
    """Keeps the entries whose mean attention weight reaches a threshold; how many that are depends on the text.

    Attributes:
        threshold: in ``unit``, over 0.
        unit: ``weight`` is the weight itself, which shrinks as a request grows (the literature's 0.01); ``relative`` is
            weight times entries: 1 is what an entry gets where all get the same.

    Raises:
        ValueError: a threshold of 0 or less, or an unknown unit.
    """

    name = "threshold"
    needs = frozenset({"attention"})

    threshold: float = 0.1
    unit: Literal["weight", "relative"] = "relative"

    def __post_init__(self) -> None:
        check_number(
            "threshold",
            self.threshold,
            lambda x: 0 < x < math.inf,
            "over 0 (at 0 nothing is evicted), and finite",
        )
        if self.unit not in ("weight", "relative"):
            raise ValueError(f"unit={self.unit!r} must be 'weight' or 'relative'")

    def keep(self, entries: Entries, is_guarded_N: Tensor) -> Tensor:
        """See RetentionPolicy."""
        scale = len(entries) if self.unit == "relative" else 1
        return entries.mean_N * scale >= self.threshold
