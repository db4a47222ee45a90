"""Collects decisions step by step, as columns of numbers; ``tokenrouter.telemetry.decisions`` writes them.

T tokens of a step.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenrouter.engine.decider import StepDecision
from tokenrouter.engine.row_owners import RowOwners
from tokenrouter.engine.step import IntArray, PackedStep

Block = dict[str, NDArray[Any]]


class DecisionRecorder:
    """The decisions taken since the last reset, one block of equally long columns per step.

    Attributes:
        blocks: columns request_index, position, token_id, phase, requested, executed, score, reason.
        request_ids: what ``request_index`` points to.
        reasons: what ``reason`` points to.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.blocks: list[Block] = []
        self.request_ids: list[str] = []
        self.reasons: list[str] = []
        self._index: dict[str, int] = {}
        self._owners, self._index_R = RowOwners(), np.zeros(0, np.int64)

    def record(self, step: PackedStep, decision: StepDecision) -> None:
        """Adds the step's fresh decisions, one row per token; to be called once per decided step."""
        fresh_T, answer = decision.fresh_T, decision.decision
        if answer is None:
            return
        request_T = np.repeat(self._requests(step), step.length_C)
        reason_of = np.array([self._reason(reason) for reason in answer.reasons])
        batch = step.batch
        self.blocks.append(
            {
                "request_index": request_T[fresh_T],
                "position": batch.positions_T.numpy()[fresh_T],
                "token_id": batch.ids_T.numpy()[fresh_T],
                "phase": batch.phase_T.numpy()[fresh_T],
                "requested": decision.requested_T[fresh_T],
                "executed": decision.executed_T[fresh_T],
                "score": answer.score_T.numpy(),
                "reason": reason_of[answer.reason_T.numpy()],
            }
        )

    def _requests(self, step: PackedStep) -> IntArray:
        """Per chunk the index of its request."""
        if len(self._index_R) != len(step.tokens.state_R):
            self._index_R = np.zeros(len(step.tokens.state_R), np.int64)
        for c in self._owners.newcomers(step).tolist():
            self._index_R[step.row_C[c]] = self._request(step.requests[c].request_id)
        index_C: IntArray = self._index_R[step.row_C]
        return index_C

    def _request(self, request_id: str) -> int:
        if request_id not in self._index:
            self._index[request_id] = len(self.request_ids)
            self.request_ids.append(request_id)
        return self._index[request_id]

    def _reason(self, reason: str) -> int:
        if reason not in self.reasons:
            self.reasons.append(reason)
        return self.reasons.index(reason)
