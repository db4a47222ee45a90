"""Running requests and their tokens side by side, so that a step reads and records all of them at once.

R rows of the pool, N tokens of a row, C chunks of a step, at most one per row.
"""

import numpy as np
from numpy.typing import NDArray

from tokenrouter.features import HistoryRows
from tokenrouter.scheduler.request import STATE, Request

IntArray = NDArray[np.int64]


class TokenRows:
    """What is known of each running request and each of its tokens, in the row that it has in the pool.

    While a request has a row, its history, decisions, times and state are views of it.

    Attributes:
        history: the tokens.
        requested_RN: int16, as ``Request.requested_N``.
        time_RN: float64, as ``Request.times_N``.
        state_R: STATE.
    """

    def __init__(self, max_rows: int, max_len: int) -> None:
        """Rows take memory as they are filled, 42 bytes a token."""
        self.history = HistoryRows(max_rows, max_len)
        self.requested_RN: NDArray[np.int16] = np.zeros((max_rows, max_len), np.int16)
        self.time_RN: NDArray[np.float64] = np.zeros((max_rows, max_len + 1))
        self.state_R = np.zeros(max_rows, STATE)

    def enter(self, request: Request, row: int) -> None:
        """The request runs in ``row`` from now on."""
        request.row = row
        request.history.move(self.history, row)
        known_N = request.requested_N
        request.requested_N = self.requested_RN[row, : request.max_total]
        request.requested_N[:] = known_N
        times_N = request.times_N
        request.times_N = self.time_RN[row, : len(times_N)]
        request.times_N[:] = times_N
        self.state_R[row] = request.state
        request.state = state = self.state_R[row]
        for name in ("number", "prompt_len", "max_total", "wants_all_logits"):
            state[name] = getattr(request, name)
        state["is_forced"] = request.forced_ids is not None

    def leave(self, request: Request) -> None:
        """The request loses its row and keeps what it knows."""
        request.row = -1
        request.history.move()
        request.requested_N = request.requested_N.copy()
        request.times_N = request.times_N.copy()
        request.state = request.state.copy()

    def run(self, row_C: IntArray, now_s: float) -> None:
        """The rows' requests run: the time that they waited counts as queue time."""
        state_C = self.state_R[row_C]
        waited_C = np.fmax(now_s - state_C["waiting_since_s"], 0)  # 0 where it did not
        first_C = state_C["first_scheduled_s"]
        state_C["queue_s"] += waited_C
        state_C["waiting_since_s"] = np.nan
        state_C["first_scheduled_s"] = np.where(np.isnan(first_C), now_s, first_C)
        self.state_R[row_C] = state_C

    def wait(self, row_C: IntArray, now_s: float) -> None:
        """The rows' requests cannot run from now on, where they could before."""
        since_C = self.state_R["waiting_since_s"][row_C]
        self.state_R["waiting_since_s"][row_C] = np.where(np.isnan(since_C), now_s, since_C)

    def advance(self, row_C: IntArray, stop_C: IntArray) -> int:
        """The tokens below ``stop_C`` have their KV; returns how many of the new ones had run before."""
        state = self.state_R
        run_C, computed_C = state["num_run"][row_C], state["num_computed"][row_C]
        state["num_computed"][row_C] = stop_C
        state["num_run"][row_C] = np.maximum(run_C, stop_C)
        state["waited_steps"][row_C] = 0
        return int(np.maximum(np.minimum(run_C, stop_C) - computed_C, 0).sum())
