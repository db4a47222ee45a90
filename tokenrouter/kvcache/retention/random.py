"""The control: any entries."""

from dataclasses import dataclass

from torch import Tensor

from tokenrouter.checks import check_integer
from tokenrouter.kvcache.retention.base import Entries, ScoredPolicy


@dataclass(kw_only=True)
class Random(ScoredPolicy):
    """By a draw that is hashed from the entry's prefix, so that a replay repeats it.

    Attributes:
        seed: other seeds draw independently.

    Raises:
        ValueError: a seed that is no integer; as ScoredPolicy.
    """

    name = "random"
    unused = frozenset({"groups"})  # it decides alike in all
    needs = frozenset({"draws"})

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("seed", self.seed)

    def score(self, entries: Entries) -> Tensor:
        """See ScoredPolicy."""
        return entries.draw_N
