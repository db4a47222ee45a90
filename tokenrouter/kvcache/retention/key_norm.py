"""Keys with a small norm receive much attention (Devoto et al. 2024, arXiv:2406.11430)."""

from dataclasses import dataclass

from torch import Tensor

from tokenrouter.kvcache.retention.base import Entries, ScoredPolicy


@dataclass(kw_only=True)
class KeyNorm(ScoredPolicy):
    """The entries with the smallest keys stay; needs no attention statistics."""

    name = "key_norm"
    needs = frozenset({"key_norm"})

    def score(self, entries: Entries) -> Tensor:
        """See ScoredPolicy."""
        return -entries.key_norm_N
