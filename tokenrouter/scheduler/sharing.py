"""How requests come by cached prefixes, and leave theirs: the requests' side of ``PrefixCache``.

A request takes over a prefix with everything that its own run would have brought: entries, recorded decisions, what was
evicted when, and the statistics that later evictions depend on.
"""

from collections.abc import Callable, Hashable

import numpy as np

from tokenrouter.kvcache import KVPool, Prefix, PrefixCache, Stretch
from tokenrouter.scheduler.request import NEVER, UNDECIDED, Request

KeyOf = Callable[[Request], Hashable | None]


class PrefixSharing:
    """Finds prefixes for requests that start, and keeps those of requests that run.

    Only prompts are shared, and of a prompt never its last token, whose logits are needed. Requests that want more
    logits compute every token whose logits they still want.

    Args:
        cache: of the prefixes.
        pool: of their slots.
        key_of: what the entries of a request's prompt depend on beside its ids, now; None where they are not to be
            shared.
        evicts: entries may be evicted at multiples of the cache's block: a prefix is then what is left there.
    """

    def __init__(
        self, cache: PrefixCache, pool: KVPool, key_of: KeyOf, *, evicts: bool = False
    ) -> None:
        self.cache = cache
        self._pool = pool
        self._key_of = key_of
        self._evicts = evicts

    def find(self, request: Request) -> Prefix | None:
        """The longest prefix that a request without entries can start with."""
        key = self._key_at_start(request)
        if key is None or request.swapped is not None:
            return None
        most = min(request.prompt_len, request.num_tokens - 1)
        if request.wants_all_logits:
            most = min(most, request.num_handed)
        history = request.history
        return self.cache.find(key, history.ids, history.prefix_hash, most)

    def start(self, request: Request, prefix: Prefix | None) -> int:
        """A request, which has just got its row, starts: with a prefix, or from its first token.

        Returns:
            The tokens that it need not compute.
        """
        request.prefix_key = self._key_at_start(request)
        block, is_shared = self.cache.block_tokens, request.prefix_key is not None
        request.num_shared = 0
        request.shares_to = request.prompt_len // block * block if is_shared else 0
        if prefix is None:
            return 0
        self._pool.adopt(request.row, prefix)
        num_tokens, stretch = prefix.num_tokens, prefix.stretch
        request.num_computed = request.num_shared = num_tokens
        request.num_run = max(request.num_run, num_tokens)
        own_N = request.requested_N[:num_tokens]
        own_N[:] = np.where(own_N == UNDECIDED, stretch.requested_N[:num_tokens], own_N)
        if stretch.evicted_at_GN is not None:
            evicted_at_GN = np.full((len(stretch.slots_GK), request.max_total), NEVER, np.int32)
            evicted_at_GN[:, :num_tokens] = stretch.evicted_at_GN[:, :num_tokens]
            request.evicted_at_GN = evicted_at_GN
        if stretch.statistics is not None:
            request.statistics = [part.copy() for part in stretch.statistics]
        return num_tokens

    def offer(self, request: Request) -> None:
        """Keeps what is new of a request's prompt: after a step in which it ran, when what was due was evicted.

        To be called after every such step while ``num_shared`` is below ``shares_to``, or a key that changes and
        changes back would not be seen.
        """
        if request.row < 0 or request.num_shared >= request.shares_to:
            return
        block = self.cache.block_tokens
        if self._key_of(request) != request.prefix_key:
            request.prefix_key, request.shares_to = None, 0
            return
        stop = min(request.num_computed, request.shares_to) // block * block
        if stop <= request.num_shared or (self._evicts and request.finished):
            return  # nothing is new, or what was due at a finished request's end was not evicted
        lengths = range(request.num_shared + block, stop + 1, block)
        if self._evicts and (request.num_computed != stop or len(lengths) > 1):
            request.prefix_key, request.shares_to = None, 0
            return
        stretch = self._stretch(request, stop)
        self.cache.insert(request.prefix_key, stretch, request.history.prefix_hash, lengths)
        request.num_shared = stop

    def _key_at_start(self, request: Request) -> Hashable | None:
        """Tokens that were decided before keep their decisions, and with them their key."""
        is_decided = request.requested_N[0] != UNDECIDED
        return request.prefix_key if is_decided else self._key_of(request)

    def _stretch(self, request: Request, stop: int) -> Stretch:
        tables, row = self._pool.tables, request.row
        kept = [
            int(np.searchsorted(t.positions_RN[row, : t.num_kept_R[row]], stop)) for t in tables
        ]
        evicted_at_GN, statistics = request.evicted_at_GN, request.statistics
        return Stretch(
            ids_N=request.history.ids[:stop].copy(),
            slots_GK=tuple(t.slots_RN[row, :k].copy() for t, k in zip(tables, kept, strict=True)),
            positions_GK=tuple(
                t.positions_RN[row, :k].copy() for t, k in zip(tables, kept, strict=True)
            ),
            requested_N=request.requested_N[:stop].copy(),
            evicted_at_GN=None if evicted_at_GN is None else evicted_at_GN[:, :stop].copy(),
            statistics=None if statistics is None else tuple(part.copy() for part in statistics),
        )
