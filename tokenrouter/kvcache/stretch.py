"""What a cached prefix is made of.

N tokens of a stretch, K entries that are kept of them, G layer groups.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenrouter.kvcache.retention import EntryStatistics
from tokenrouter.kvcache.slots import SlotArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stretch:
    """What a request had computed at one moment; prefixes of it are read from its beginning.

    Attributes:
        ids_N: int64 token ids.
        slots_GK: per layer group, int64 slots of the entries that are kept, oldest first.
        positions_GK: int64, their original positions.
        requested_N: int16, the recorded decision of each token.
        evicted_at_GN: int32, as in Request; None without retention.
        statistics: per layer group, what the entries received so far; None where the policy does not look.
    """

    ids_N: NDArray[np.int64]
    slots_GK: tuple[SlotArray, ...]
    positions_GK: tuple[NDArray[np.int64], ...]
    requested_N: NDArray[np.int16]
    evicted_at_GN: NDArray[np.int32] | None = None
    statistics: tuple[EntryStatistics, ...] | None = None


class Prefix(NamedTuple):
    """The first ``num_tokens`` tokens of a stretch: all of them, where entries were evicted from it."""

    stretch: Stretch
    num_tokens: int

    def slots(self, group: int) -> SlotArray:
        """Its entries' slots in one layer group."""
        return self.stretch.slots_GK[group][: self.num_tokens]

    def positions(self, group: int) -> NDArray[np.int64]:
        """Original positions of its entries in one layer group."""
        return self.stretch.positions_GK[group][: self.num_tokens]
