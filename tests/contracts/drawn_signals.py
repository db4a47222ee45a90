"""Signals for the contract of a router: numbers as an engine has them, but drawn by each token's prefix.

T tokens.
"""

from torch import Tensor

from tokenrouter.features import FEATURES, Signals
from tokenrouter.features.draws import DRAW_LEVELS, draw_levels
from tokenrouter.features.signals import ROW_SIGNALS
from tokenrouter.types import TokenBatch

LARGEST = 8.0


class DrawnSignals(Signals):
    """The same number for the same prefix, in any batch and any row."""

    def row_value(self, name: str, batch: TokenBatch) -> Tensor:
        draws_T = draw_levels(batch.prefix_hash_T, ROW_SIGNALS.index(name)) / DRAW_LEVELS
        return draws_T * min(LARGEST, FEATURES[name].high)
