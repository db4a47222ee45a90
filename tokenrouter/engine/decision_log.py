"""Collects decisions step by step, as columns of numbers; ``tokenrouter.telemetry.decisions`` writes them.

T tokens of a step.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenrouter.engine.decider import StepDecision
from tokenrouter.engine.row_owners import RowTable
from tokenrouter.engine.step import PackedStep
from tokenrouter.scheduler import Request

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
        self._index_of_row = RowTable(np.int64, self._request)

    def record(self, step: PackedStep, decision: StepDecision) -> None:
        """Adds the step's fresh decisions, one row per token; to be called once per decided step."""
        fresh_T, answer = decision.fresh_T, decision.decision
        if answer is None:
            return
        request_T = self._index_of_row.read(step)[step.batch.row_T.numpy()]
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

    def _request(self, request: Request) -> int:
        index = self._index.setdefault(request.request_id, len(self.request_ids))
        if index == len(self.request_ids):
            self.request_ids.append(request.request_id)
        return index

    def _reason(self, reason: str) -> int:
        if reason not in self.reasons:
            self.reasons.append(reason)
        return self.reasons.index(reason)
