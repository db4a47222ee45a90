"""The last queries vote (SnapKV, Li et al. 2024, arXiv:2404.14469)."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from tokenrouter.checks import check_count
from tokenrouter.kvcache.retention.base import Entries, ScoredPolicy


@dataclass(kw_only=True)
class ObservationWindow(ScoredPolicy):
    """By the mean weight from the last window's queries, the largest among neighbours.

    Attributes:
        pool_size: so many neighbouring entries share their largest weight, odd; 1: none. What stands beside a token
            that is looked at is needed with it.

    Raises:
        ValueError: an even or too small ``pool_size``.
    """

    name = "observation_window"
    needs = frozenset({"attention"})
    unused = frozenset({"decay"})

    pool_size: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("pool_size", self.pool_size, 1)
        if self.pool_size % 2 == 0:
            raise ValueError(f"pool_size={self.pool_size} must be odd and at least 1")

    def score(self, entries: Entries) -> Tensor:
        """See ScoredPolicy."""
        pooled_11N = F.max_pool1d(
            entries.last_N[None, None], self.pool_size, stride=1, padding=self.pool_size // 2
        )
        return pooled_11N[0, 0]
