"""Entries that change their slots."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Moves(NamedTuple):
    """From slot ``before_N[i]`` to slot ``after_N[i]``, both int64, each slot once."""

    before_N: NDArray[np.int64]
    after_N: NDArray[np.int64]

    def renumber(self, slots: NDArray[np.int64]) -> None:
        """Replaces old numbers by new ones in place; each must be among ``before_N``."""
        if len(slots):
            new_S = np.empty(int(self.before_N.max()) + 1, np.int64)
            new_S[self.before_N] = self.after_N
            slots[:] = new_S[slots]
