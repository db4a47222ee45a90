"""The tokens of running requests side by side, so that a step gathers and records all of them at once.

R rows of the pool, N tokens of a row, T tokens of a step.
"""

import numpy as np
from numpy.typing import NDArray

from tokenrouter.scheduler.request import UNDECIDED, Request


class TokenRows:
    """What is known of each token, in the row that its request has in the pool.

    While a request has a row, its history and its decisions are views of it.

    Attributes:
        ids_RN, repeats_RN, turn_start_RN, prefix_hash_RN: int64, as in ``TokenHistory``.
        requested_RN: int16, as ``Request.requested_N``.
    """

    def __init__(self, max_rows: int, max_len: int) -> None:
        """Rows take memory as they are filled, 34 bytes a token."""
        shape = max_rows, max_len
        self.ids_RN: NDArray[np.int64] = np.zeros(shape, np.int64)
        self.repeats_RN: NDArray[np.int64] = np.zeros(shape, np.int64)
        self.turn_start_RN: NDArray[np.int64] = np.zeros(shape, np.int64)
        self.prefix_hash_RN: NDArray[np.int64] = np.zeros(shape, np.int64)
        self.requested_RN: NDArray[np.int16] = np.zeros(shape, np.int16)

    def enter(self, request: Request, row: int) -> None:
        """The request runs in ``row`` from now on."""
        request.row = row
        request.history.move(
            self.ids_RN[row],
            self.repeats_RN[row],
            self.turn_start_RN[row],
            self.prefix_hash_RN[row],
        )
        known_N = request.requested_N
        request.requested_N = self.requested_RN[row, : request.max_total]
        request.requested_N[:] = UNDECIDED
        request.requested_N[: len(known_N)] = known_N

    def leave(self, request: Request) -> None:
        """The request loses its row and keeps what it knows."""
        request.row = -1
        size = request.max_total
        request.history.move(*(np.zeros(size, np.int64) for _ in range(4)))
        request.requested_N = request.requested_N.copy()
