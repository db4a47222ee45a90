"""Heavy hitters: the entries that received most attention so far (H2O, Zhang et al. 2023, arXiv:2306.14048)."""

from dataclasses import dataclass

from torch import Tensor

from tokenrouter.kvcache.retention.base import Entries, ScoredPolicy


@dataclass(kw_only=True)
class HeavyHitter(ScoredPolicy):
    """By the mean weight over all observed queries that could see the entry.

    H2O sums, which favours old entries, since more queries have seen them; the mean does not.
    """

    name = "heavy_hitter"
    needs = frozenset({"attention"})

    def score(self, entries: Entries) -> Tensor:
        """See ScoredPolicy."""
        return entries.mean_N
