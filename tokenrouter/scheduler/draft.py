"""A plan in the making."""

import numpy as np

from tokenrouter.scheduler.base import StepPlan
from tokenrouter.scheduler.limits import SchedulerLimits
from tokenrouter.scheduler.request import Request


class Draft:
    """The chunks chosen so far, and what is left of a step's budgets.

    Args:
        limits: of the step.
        is_mixed: tokens of both phases may be in it.

    Attributes:
        lengths: tokens per request, in the order in which they were chosen.
        preempted: requests that lost their slots.
        num_shared_tokens: tokens that admitted requests have from the prefix cache.
    """

    def __init__(self, limits: SchedulerLimits, *, is_mixed: bool = True) -> None:
        self.lengths: dict[Request, int] = {}
        self.preempted: list[Request] = []
        self.num_shared_tokens = 0
        self._most = limits.max_num_batched_tokens
        self._most_of_phase = {
            True: limits.max_decode_tokens or self._most,
            False: limits.max_prefill_tokens or self._most,
        }
        self._used = {True: 0, False: 0}
        self._is_mixed = is_mixed

    def left(self, *, decoding: bool) -> int:
        """Tokens of a phase that still fit."""
        left = self._most - sum(self._used.values())
        return min(left, self._most_of_phase[decoding] - self._used[decoding])

    def ran(self, *, decoding: bool) -> bool:
        """Whether any token of a phase was chosen."""
        return self._used[decoding] > 0

    def may_join(self, request: Request) -> bool:
        """Whether the request's next tokens are of a phase that the step is for."""
        return self._is_mixed or not self.ran(decoding=not request.decoding)

    def take(self, request: Request, length: int) -> None:
        """Chooses the request's next ``length`` tokens."""
        self.lengths[request] = length
        self._used[request.decoding] += length

    def drop(self, request: Request) -> None:
        """Gives back what was chosen of a request that is about to be preempted."""
        self._used[request.decoding] -= self.lengths.pop(request, 0)
        self.preempted.append(request)

    def plan(self) -> StepPlan:
        """The plan as it stands."""
        requests = tuple(self.lengths)
        return StepPlan(
            requests=requests,
            row_C=np.array([request.row for request in requests], np.int64),
            start_C=np.array([request.num_computed for request in requests], np.int64),
            length_C=np.array(list(self.lengths.values()), np.int64),
            preempted=tuple(self.preempted),
            num_shared_tokens=self.num_shared_tokens,
        )
