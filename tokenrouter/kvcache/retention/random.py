"""The control: any entries."""

from dataclasses import dataclass

from torch import Tensor

from tokenrouter.kvcache.retention.base import Entries, ScoredPolicy


@dataclass(kw_only=True)
class Random(ScoredPolicy):
    """By a draw that is hashed from the entry's prefix, so that a replay repeats it.

    Attributes:
        seed: other seeds draw independently.
    """

    name = "random"
    needs = frozenset({"draws"})

    seed: int = 0

    def score(self, entries: Entries) -> Tensor:
        """See ScoredPolicy."""
        return entries.draw_N
