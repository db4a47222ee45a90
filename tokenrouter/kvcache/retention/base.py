"""The contract of a retention policy: one small scoring function says which entries of a request are kept.

The idea is kvpress' (Devoto, Jeblick and Jegou 2025, arXiv:2510.00636): a method is a score, everything around it is
common. N entries of one request in one layer group, oldest first.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from math import ceil
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tokenrouter.checks import check_count, check_number

Need = Literal["attention", "key_norm", "draws", "classes", "ids"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entries:
    """What a policy may look at. Nothing in it depends on other requests, on chunk sizes or on time.

    Attributes:
        positions_N: int64, original positions, ascending.
        num_seen: tokens of the request so far, those evicted included: a multiple of the interval.
        last_N: float32, mean attention weight from the queries of the last window that could see the entry (over
            heads and observed layers).
        mean_N: the same over all windows so far, each worth ``decay`` times the next.
        key_norm_N: float32, L2 norm of the key, mean over key heads and layers.
        draw_N: float32 in [0, 1), a hash of the entry's prefix and the policy's seed.
        class_N: int64, index into ``CLASSES``: the retention class of the entry's token.
        ids_S: int64 ``[num_seen]``, ids of all tokens seen, those evicted included.
        depth: where the layer group lies that keeps these entries, over 0 (the first layers) to below 1.

    What the policy does not need is empty; ``class_N`` and ``depth`` are always there.
    """

    positions_N: Tensor
    num_seen: int
    last_N: Tensor
    mean_N: Tensor
    key_norm_N: Tensor
    draw_N: Tensor
    class_N: Tensor
    ids_S: Tensor
    depth: float

    def __len__(self) -> int:
        return self.positions_N.shape[0]


class RetentionPolicy(ABC):
    """Scores entries. ``keep`` turns scores into a choice; guards are applied around it.

    Attributes:
        name: what the policy is called in configs, tables and notes.
        needs: what must be in the entries that it is given.
        unused: fields of RetentionOptions that change nothing beside it, and of which a run that sets them is told;
            those of the observation are meant anyway where ``needs`` has no attention.
        seed: of the hashed draws that it needs; any integer, and other seeds draw independently.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[Need]] = frozenset()
    unused: ClassVar[frozenset[str]] = frozenset()
    seed: int = 0

    @abstractmethod
    def keep(self, entries: Entries, is_guarded_N: Tensor) -> Tensor:
        """Which entries stay, bool ``[N]``; guarded ones stay whatever it says.

        Args:
            entries: of one request and layer group.
            is_guarded_N: bool, entries that stay; a policy with a budget counts them in.
        """

    def use_for(self, *, model: str, model_hash: str) -> None:
        """Hears from the engine whose entries it will judge; by default any will do.

        Raises:
            ValueError: it was made for another model.
        """

    def max_kept(self, num_seen: int) -> int:
        """Most entries that may be left of ``num_seen``, guards aside: for admission."""
        return num_seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How many entries stay.

    Attributes:
        evicted_frac: share of the tokens seen that is evicted, 0 (none) to below 1.
        max_entries: at most so many, however long the request; None: no such bound.

    Raises:
        ValueError: out of range.
    """

    evicted_frac: float = 0.0
    max_entries: int | None = None

    def __post_init__(self) -> None:
        check_number("evicted_frac", self.evicted_frac, lambda x: 0 <= x < 1, "of 0 to below 1")
        if self.max_entries is not None:
            check_count("max_entries", self.max_entries, 1)

    def num_kept(self, num_seen: int) -> int:
        """Entries that stay of ``num_seen`` tokens."""
        kept = ceil(num_seen * (1.0 - self.evicted_frac))
        return kept if self.max_entries is None else min(kept, self.max_entries)


@dataclass(kw_only=True)
class ScoredPolicy(RetentionPolicy):
    """Keeps the entries with the largest scores, as many as the budget says.

    Attributes:
        evicted_frac, max_entries: see Budget.
        recent_frac: share of the budget that the newest entries have, whatever their scores: most of what a small model
            looks at is near, and scores choose the rest best (experiments/LOG.md).

    Raises:
        ValueError: out of range.
    """

    evicted_frac: float = 0.5
    max_entries: int | None = None
    recent_frac: float = 0.0
    _budget: Budget = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._budget = Budget(evicted_frac=self.evicted_frac, max_entries=self.max_entries)
        check_number("recent_frac", self.recent_frac, lambda x: 0 <= x <= 1, "of 0 to 1")

    @abstractmethod
    def score(self, entries: Entries) -> Tensor:
        """Float32 ``[N]``: larger is rather kept. Of equals the newer one stays."""

    def keep(self, entries: Entries, is_guarded_N: Tensor) -> Tensor:
        """See RetentionPolicy."""
        num_kept = self._budget.num_kept(entries.num_seen)
        if num_kept >= len(entries):
            return torch.ones(len(entries), dtype=torch.bool)
        score_N = self.score(entries).masked_fill(is_guarded_N, float("inf"))
        score_N[len(entries) - int(self.recent_frac * num_kept) :] = float("inf")
        newest_first = score_N.flip(0).sort(descending=True, stable=True).indices[:num_kept]
        is_kept_N = torch.zeros(len(entries), dtype=torch.bool)
        is_kept_N[len(entries) - 1 - newest_first] = True
        return is_kept_N

    def max_kept(self, num_seen: int) -> int:
        """See RetentionPolicy."""
        return self._budget.num_kept(num_seen)
