"""Nothing is evicted."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenrouter.kvcache.retention.base import Entries, RetentionPolicy


@dataclass(kw_only=True)
class Full(RetentionPolicy):
    """Keeps every entry; what the others are compared with at the same chunk boundaries."""

    name = "full"
    unused = frozenset({"groups", "sinks", "recent"})

    def keep(self, entries: Entries, is_guarded_N: Tensor) -> Tensor:
        """See RetentionPolicy."""
        return torch.ones(len(entries), dtype=torch.bool)
