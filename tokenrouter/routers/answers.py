"""Answers kept for tokens that look the same: bounded, exact in what it finds, no loop over tokens.

Shape letters: T tokens that are looked up, M tokens to keep, C columns of a key, W ways of a set,
S entries.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenrouter.types import RoutingDecision

IntArray = NDArray[np.int64]
WAYS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(slots=True)
class CacheCounts:
    """What a cache of answers did since its counters were last reset.

    Attributes:
        lookups: tokens looked up.
        hits: those that cost no decision: their answer was kept, or asked for with another of their call.
    """

    lookups: int = 0
    hits: int = 0

    def reset(self) -> None:
        """Back to zero; what is kept stays."""
        self.lookups, self.hits = 0, 0


def hash_rows(key_TC: IntArray) -> IntArray:
    """A 64-bit hash per row, int64 [T]: columns are taken in one after another, each well mixed (splitmix64)."""
    hash_T = np.full(len(key_TC), _GOLDEN, np.uint64)
    for column_T in key_TC.T.astype(np.uint64):
        hash_T = (hash_T ^ column_T) * _GOLDEN
        hash_T = (hash_T ^ (hash_T >> np.uint64(30))) * _MIX_1
        hash_T = (hash_T ^ (hash_T >> np.uint64(27))) * _MIX_2
        hash_T ^= hash_T >> np.uint64(31)
    return hash_T.view(np.int64)


class AnswerCache:
    """Keys to answers, in sets of 8 entries as processor caches have them.

    A full set gives up the entry that was used least recently. A hit is one of the whole key, not
    of its hash.

    Args:
        capacity: entries; rounded down to whole sets.

    Raises:
        ValueError: fewer than 8 entries.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < WAYS:
            raise ValueError(f"capacity={capacity} must be at least {WAYS} answers")
        self._num_sets = capacity // WAYS
        self.clear()

    def clear(self) -> None:
        """Empty."""
        size = self._num_sets * WAYS
        self._clock = 0
        self._used_S = np.zeros(size, np.int64)  # 0: empty; else when it was last used
        self._hash_S = np.zeros(size, np.int64)
        self._key_SC: IntArray | None = None  # its width comes with the first key
        self._route_S = np.zeros(size, np.int64)
        self._reason_S = np.zeros(size, np.int64)
        self._score_S = np.zeros(size, np.float32)
        self._reasons: tuple[str, ...] = ()

    def __len__(self) -> int:
        return int((self._used_S > 0).sum())

    def answer(
        self,
        key_TC: IntArray,
        ask: Callable[[Tensor], RoutingDecision],
        device: torch.device,
    ) -> tuple[RoutingDecision, int]:
        """The answer of every key, kept or asked for.

        Args:
            key_TC: int64; tokens of equal rows get one answer.
            ask: gets int64 indices of tokens, one for each key that is not kept (possibly none
                where no reasons are known yet), and answers them in that order.
            device: of the indices and of the answer.

        Returns:
            One entry per token, and how many tokens were answered without asking.
        """
        hash_T = hash_rows(key_TC)
        slot_T = self._find(hash_T, key_TC)
        missing_M, num_asked = np.flatnonzero(slot_T < 0), 0
        route_T, score_T = self._route_S[slot_T], self._score_S[slot_T]
        reason_T = self._reason_S[slot_T]
        if len(missing_M) or not self._reasons:
            first_M, of_M = _distinct(hash_T[missing_M], key_TC[missing_M])
            asked, num_asked = missing_M[first_M], len(first_M)
            fresh = ask(torch.from_numpy(asked).to(device))
            assert self._reasons in ((), fresh.reasons), "a router's vocabulary of reasons is fixed"
            self._reasons = fresh.reasons
            route, score, reason = (
                part.cpu().numpy() for part in (fresh.route_T, fresh.score_T, fresh.reason_T)
            )
            route_T[missing_M], score_T[missing_M] = route[of_M], score[of_M]
            reason_T[missing_M] = reason[of_M]
            kept_M, slot_M = self._make_room(hash_T[asked])
            self._keep(slot_M, hash_T[asked][kept_M], key_TC[asked][kept_M])
            self._route_S[slot_M], self._score_S[slot_M] = route[kept_M], score[kept_M]
            self._reason_S[slot_M] = reason[kept_M]
        decision = RoutingDecision(
            route_T=torch.from_numpy(route_T).to(device),
            score_T=torch.from_numpy(score_T).to(device),
            reason_T=torch.from_numpy(reason_T).to(device),
            reasons=self._reasons,
        )
        return decision, len(key_TC) - num_asked

    def _find(self, hash_T: IntArray, key_TC: IntArray) -> IntArray:
        """Entry per key, -1 where it is not kept; what is found counts as used."""
        self._clock += 1
        if self._key_SC is None:
            return np.full(len(hash_T), -1)
        entry_TW = self._entries(hash_T)
        is_it_TW = (self._hash_S[entry_TW] == hash_T[:, None]) & (self._used_S[entry_TW] > 0)
        slot_T = entry_TW[np.arange(len(hash_T)), is_it_TW.argmax(axis=1)]
        is_found_T = is_it_TW.any(axis=1) & (self._key_SC[slot_T] == key_TC).all(axis=1)
        self._used_S[slot_T[is_found_T]] = self._clock
        return np.where(is_found_T, slot_T, -1)

    def _entries(self, hash_T: IntArray) -> IntArray:
        """The entries [T, W] of the set that each hash belongs to."""
        set_T = (hash_T.view(np.uint64) % np.uint64(self._num_sets)).astype(np.int64)
        return set_T[:, None] * WAYS + np.arange(WAYS)

    def _make_room(self, hash_M: IntArray) -> tuple[IntArray, IntArray]:
        """Entries for new keys, the least recently used of their sets; and which keys have one.

        Of more than 8 keys that come into one set at once, 8 are kept.
        """
        entry_MW = self._entries(hash_M)
        order_M = np.argsort(entry_MW[:, 0], kind="stable")
        set_M = entry_MW[order_M, 0]
        index_M = np.arange(len(set_M))
        is_first_M = np.r_[True, set_M[1:] != set_M[:-1]][: len(set_M)]
        rank_M = index_M - np.maximum.accumulate(np.where(is_first_M, index_M, 0))
        oldest_MW = np.argsort(self._used_S[entry_MW[order_M]], axis=1, kind="stable")
        fits_M = rank_M < WAYS
        kept_M, rank_M = order_M[fits_M], rank_M[fits_M]
        return kept_M, entry_MW[kept_M, oldest_MW[fits_M, rank_M]]

    def _keep(self, slot_M: IntArray, hash_M: IntArray, key_MC: IntArray) -> None:
        if self._key_SC is None:
            self._key_SC = np.zeros((len(self._used_S), key_MC.shape[1]), np.int64)
        self._used_S[slot_M] = self._clock
        self._hash_S[slot_M] = hash_M
        self._key_SC[slot_M] = key_MC


def _distinct(hash_M: IntArray, key_MC: IntArray) -> tuple[IntArray, IntArray]:
    """Where each distinct key stands first, and per row which of them it is."""
    _, first, of_M = np.unique(hash_M, return_index=True, return_inverse=True)
    if (key_MC[first][of_M] == key_MC).all():
        return first, of_M
    everything = np.arange(len(hash_M))  # two keys of one hash: each is its own
    return everything, everything
