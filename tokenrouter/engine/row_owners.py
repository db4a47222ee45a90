"""Who had a row last: so that what a request asks for is written down once, when it comes into its row."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tokenrouter.engine.step import IntArray, PackedStep
from tokenrouter.scheduler import Request

NOBODY: IntArray = np.zeros(0, np.int64)


class RowOwners:
    """Remembers with which request each row was seen last, by its number: it keeps no request alive."""

    def __init__(self) -> None:
        self._number_R: IntArray = np.zeros(0, np.int64)
        self._last_C = NOBODY

    def newcomers(self, step: PackedStep) -> IntArray:
        """The chunks of ``step`` whose requests are not those that their rows were seen with last."""
        if step.row_C is self._last_C:  # a plan that was moved on
            return NOBODY
        self._last_C = step.row_C
        num_rows = len(step.tokens.state_R)
        if len(self._number_R) != num_rows:
            self._number_R = np.full(num_rows, -1)
        number_C: IntArray = step.state_C["number"]
        new_C: IntArray = np.flatnonzero(self._number_R[step.row_C] != number_C)
        self._number_R[step.row_C[new_C]] = number_C[new_C]
        return new_C


class RowTable:
    """A value for each row, of the request that was seen there last.

    Args:
        dtype: of a value.
        describe: the value of a request; asked once, when it comes into its row.
    """

    def __init__(self, dtype: DTypeLike, describe: Callable[[Request], Any]) -> None:
        self._owners = RowOwners()
        self._describe = describe
        self._values_R: NDArray[Any] = np.zeros(0, dtype)

    def read(self, step: PackedStep) -> NDArray[Any]:
        """The values of all rows; those of the step's rows are its requests'."""
        num_rows = len(step.tokens.state_R)
        if len(self._values_R) != num_rows:
            self._values_R = np.zeros(num_rows, self._values_R.dtype)
        for c in self._owners.newcomers(step).tolist():
            self._values_R[step.row_C[c]] = self._describe(step.requests[c])
        return self._values_R
