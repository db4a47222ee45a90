"""Prefix sharing: what requests computed of their prompts stays, and others with the same beginning use it.

Hashed spans: a prefix may be found where its length is a multiple of the block, by its key, its length and the rolling
hash of its ids; the ids are then compared. The cache holds a reference to every slot of a prefix, so a request that
evicts an entry, or ends, changes nothing for others. Slots that no request uses are given up when a request needs them,
least recently used prefixes first, of one prompt the longest first (PagedAttention, Kwon et al. 2023, arXiv:2309.06180;
RadixAttention, Zheng et al. 2024, arXiv:2312.07104).

N tokens of a prompt.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenrouter.kvcache.moves import Moves
from tokenrouter.kvcache.pool import KVPool
from tokenrouter.kvcache.slots import SlotArray
from tokenrouter.kvcache.stretch import Prefix, Stretch


class _Name(NamedTuple):
    """Where a prefix is found. Different ids may have one name: the first that came keeps it."""

    key: Hashable
    num_tokens: int
    hash: int


class PrefixCache:
    """Prefixes in the order of their last use.

    Args:
        pool: of the slots; it asks the cache for room.
        block_tokens: lengths that are kept are multiples of it, at least 1.

    Attributes:
        block_tokens: as given.
    """

    def __init__(self, pool: KVPool, block_tokens: int) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
        self._pool = pool
        self.block_tokens = block_tokens
        self._found: OrderedDict[_Name, Prefix] = OrderedDict()
        pool.prefixes = self

    def __len__(self) -> int:
        """Prefixes that are held."""
        return len(self._found)

    def find(
        self, key: Hashable, ids_N: NDArray[np.int64], hash_N: NDArray[np.int64], most: int
    ) -> Prefix | None:
        """The longest prefix of ``ids_N`` with at most ``most`` tokens, which counts as used; None: there is none.

        Args:
            key: what its content depends on beside the ids.
            ids_N: int64 token ids.
            hash_N: int64, per position the hash of the ids up to and including it.
            most: at most ``len(ids_N)``.
        """
        for num_tokens in range(self._floor(most), 0, -self.block_tokens):
            prefix = self._get(key, ids_N, hash_N, num_tokens)
            if prefix is not None:
                self._touch(key, hash_N, num_tokens)
                return prefix
        return None

    def insert(
        self, key: Hashable, stretch: Stretch, hash_N: NDArray[np.int64], lengths: Sequence[int]
    ) -> None:
        """Keeps prefixes of a stretch; those that are there already stay as they are.

        Args:
            key: as in ``find``.
            stretch: its slots are in use.
            hash_N: as in ``find``.
            lengths: multiples of the block, ascending.
        """
        for num_tokens in lengths:
            name = _Name(key, num_tokens, int(hash_N[num_tokens - 1]))
            if name not in self._found:
                self._found[name] = prefix = Prefix(stretch, num_tokens)
                for group, table in enumerate(self._pool.tables):
                    table.slots.hold(prefix.slots(group))
        self._touch(key, hash_N, lengths[-1])

    def drop_until_free(self, num_slots: int) -> None:
        """Drops least recently used prefixes until every group has ``num_slots`` free.

        First those whose end frees something by itself, then, where slots have several prefixes, any.
        """
        for frees_alone in (True, False):
            for name, prefix in list(self._found.items()):
                if self._pool.free >= num_slots:
                    return
                if not frees_alone or self._frees_any(prefix):
                    self._drop(name, prefix)

    def clear(self) -> None:
        """Drops all prefixes; requests that use their slots keep them."""
        for name, prefix in list(self._found.items()):
            self._drop(name, prefix)

    def held(self, group: int) -> list[SlotArray]:
        """The slots in one group that each prefix holds."""
        return [prefix.slots(group) for prefix in self._found.values()]

    def renumber(self, group: int, moves: Moves) -> None:
        """The entries of a group have moved."""
        longest: dict[Stretch, Prefix] = {}
        for prefix in self._found.values():
            if prefix.num_tokens >= longest.get(prefix.stretch, prefix).num_tokens:
                longest[prefix.stretch] = prefix
        for prefix in longest.values():
            moves.renumber(prefix.slots(group))

    def _frees_any(self, prefix: Prefix) -> bool:
        """Where nothing was evicted, shorter prefixes hold all but the last block."""
        tail = 0 if prefix.stretch.evicted_at_GN is not None else -self.block_tokens
        tables = enumerate(self._pool.tables)
        return any(table.slots.num_freed_by(prefix.slots(group)[tail:]) for group, table in tables)

    def _drop(self, name: _Name, prefix: Prefix) -> None:
        for group, table in enumerate(self._pool.tables):
            table.slots.let_go(prefix.slots(group))
        del self._found[name]

    def _floor(self, num_tokens: int) -> int:
        return num_tokens // self.block_tokens * self.block_tokens

    def _get(
        self, key: Hashable, ids_N: NDArray[np.int64], hash_N: NDArray[np.int64], num_tokens: int
    ) -> Prefix | None:
        prefix = self._found.get(_Name(key, num_tokens, int(hash_N[num_tokens - 1])))
        if prefix is None:
            return None
        same = np.array_equal(prefix.stretch.ids_N[:num_tokens], ids_N[:num_tokens])
        return prefix if same else None

    def _touch(self, key: Hashable, hash_N: NDArray[np.int64], num_tokens: int) -> None:
        """A prefix was used, and with it the shorter ones of the same prompt, which others need rather than it."""
        for shorter in range(num_tokens, 0, -self.block_tokens):
            name = _Name(key, shorter, int(hash_N[shorter - 1]))
            if name in self._found:
                self._found.move_to_end(name)
