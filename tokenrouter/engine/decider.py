"""Where a token gets its route: once, recorded, and the same in prefill, decode, preemption and recompute.

T tokens of a step, N those of them that are decided in it, C chunks, E hidden size.
"""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenrouter.engine.asking import repeated_routes, repeating, tokens_ahead, with_repeats
from tokenrouter.engine.row_owners import RowTable
from tokenrouter.engine.step import IntArray, PackedStep
from tokenrouter.features import FeatureExtractor, sequence_batch
from tokenrouter.routers.base import Router
from tokenrouter.scheduler import UNDECIDED, Request, RequestDecision
from tokenrouter.types import Phase, RouteInput, RoutingDecision, TokenBatch

_BOTH = frozenset(Phase)
UNASKED = "phase that the router does not decide"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDecision:
    """The routes of a step's tokens.

    Attributes:
        requested_T: what the router asked for.
        executed_T: what runs: the same, but where the pool lacks an executor.
        fresh_T: which tokens were decided in this step.
        decision: the answer for the fresh tokens, one entry each; None when there were none.
        seconds: time in features and router.
        num_repeated: fresh tokens that repeat an earlier one's decision.
    """

    requested_T: IntArray
    executed_T: IntArray
    fresh_T: NDArray[np.bool_]
    decision: RoutingDecision | None
    seconds: float
    num_repeated: int = 0


class Decider:
    """Runs features and router for undecided tokens and writes the answer to the requests."""

    def __init__(
        self,
        router: Router,
        extractor: FeatureExtractor,
        executed_of: IntArray,
        route_names: Sequence[str],
    ) -> None:
        """``executed_of`` maps a requested route to the one that runs; they differ where the pool lacks an executor."""
        self._router = router
        self._extract = extractor.extract
        self._token_types = extractor.token_types
        self._executed_of = executed_of
        self._route_names = route_names
        self._warns = not np.array_equal(executed_of, np.arange(len(executed_of)))
        self._answers = _RequestAnswers()

    def admit(self, requests: Sequence[Request]) -> float:
        """Asks a router that works per request, once for the completions of one prompt.

        The answer is kept with each of them; their tokens are decided by it, step by step, like all others.

        Returns:
            The seconds it took.
        """
        if self._router.level != "request":
            return 0.0
        started = time.perf_counter()
        prompt_ids = requests[0].history.ids[: requests[0].prompt_len]
        batch = sequence_batch(prompt_ids.tolist(), token_types=self._token_types)
        answer = self._ask(self._extract(batch))
        for request in requests:
            request.decision = RequestDecision(
                route=int(answer.route_T[0]),
                score=float(answer.score_T[0]),
                reason=answer.reasons[int(answer.reason_T[0])],
            )
        return time.perf_counter() - started

    def decide(self, step: PackedStep, hidden_TE: Tensor | None = None) -> StepDecision:
        """The routes of the step's tokens, fresh or recorded.

        Args:
            step: packed.
            hidden_TE: of its tokens, where the router is asked after some layers.
        """
        started = time.perf_counter()
        requested_T = step.requested_T
        fresh_T = requested_T == UNDECIDED
        decision, num_repeated = None, 0
        if fresh_T.any():
            repeats_T = repeating(step, fresh_T, self._router)
            asked_T = fresh_T if repeats_T is None else fresh_T & ~repeats_T
            decision = self._answer(step, asked_T, hidden_TE)
            requested_T[asked_T] = decision.route_T.numpy()
            step.record_decisions()
            if repeats_T is not None and (num_repeated := int(repeats_T.sum())):
                requested_T[repeats_T] = repeated_routes(step, repeats_T, self._router)
                step.record_decisions()
                decision = with_repeats(decision, repeats_T[fresh_T], requested_T[fresh_T])
            if self._warns:
                self._warn_if_degraded(requested_T)
        return StepDecision(
            requested_T=requested_T,
            executed_T=self._executed_of[requested_T],
            fresh_T=fresh_T,
            decision=decision,
            seconds=time.perf_counter() - started,
            num_repeated=num_repeated,
        )

    def _answer(
        self, step: PackedStep, fresh_T: NDArray[np.bool_], hidden_TE: Tensor | None
    ) -> RoutingDecision:
        """One entry per token of ``fresh_T``; those of phases that the router does not decide take route 0."""
        if not fresh_T.any():
            return RoutingDecision.constant(0, 0, UNASKED)
        if (block := self._router.look_ahead) and (ahead := tokens_ahead(step, block)) is not None:
            self._router.prepare(self._extract(ahead))
        router, asked_T = self._router, fresh_T
        decides_all = router.phases >= _BOTH
        if not decides_all:
            asked_T = fresh_T & np.isin(step.batch.phase_T.numpy(), list(router.phases))
        if router.level == "request":
            answer = self._answers.spread(step, asked_T)
        else:
            batch = step.batch if hidden_TE is None else replace(step.batch, hidden_TE=hidden_TE)
            batch = batch if asked_T.all() else _select(batch, asked_T)
            answer = self._ask(self._extract(batch))
        if decides_all:
            return answer
        asked_N = asked_T[fresh_T]
        return answer.among(torch.from_numpy(np.flatnonzero(asked_N)), len(asked_N), UNASKED)

    def _ask(self, inputs: RouteInput) -> RoutingDecision:
        """The router's answer, checked."""
        router, num_routes = self._router, len(self._executed_of)
        answer = router.route(inputs)
        if answer.route_T.shape != inputs.ids_T.shape:
            raise ValueError(
                f"router {router.name} decided {len(answer.route_T)} of {len(inputs)} tokens"
            )
        route_T = answer.route_T.numpy()
        if len(inputs) and not 0 <= route_T.min() <= route_T.max() < num_routes:
            raise ValueError(f"router {router.name} answered a route outside 0 .. {num_routes - 1}")
        return answer

    def _warn_if_degraded(self, requested_T: IntArray) -> None:
        executed_T = self._executed_of[requested_T]
        lost = np.flatnonzero(executed_T != requested_T)
        if not len(lost):
            return
        self._warns = False
        asked = self._route_names[requested_T[lost[0]]]
        runs = self._route_names[executed_T[lost[0]]]
        warnings.warn(
            f"router {self._router.name} asks for route {asked!r}, whose executor the pool does not have: "
            f"its tokens run on {runs!r} (choose another pool, e.g. executor=int8)",
            stacklevel=2,
        )


def _select(batch: TokenBatch, is_wanted_T: NDArray[np.bool_]) -> TokenBatch:
    return batch.select(torch.from_numpy(np.flatnonzero(is_wanted_T)))


class _RequestAnswers:
    """The answers that requests got at their admission, by row."""

    def __init__(self) -> None:
        self._reasons: dict[str, int] = {}
        columns = [("route", np.int64), ("score", np.float32), ("reason", np.int64)]
        self._answer_of_row = RowTable(columns, self._answer)

    def spread(self, step: PackedStep, asked_T: NDArray[np.bool_]) -> RoutingDecision:
        """For each of the asked tokens its request's."""
        answer_N = self._answer_of_row.read(step)[step.batch.row_T.numpy()[asked_T]]
        return RoutingDecision(
            route_T=torch.from_numpy(answer_N["route"].copy()),
            score_T=torch.from_numpy(answer_N["score"].copy()),
            reason_T=torch.from_numpy(answer_N["reason"].copy()),
            reasons=tuple(self._reasons),
        )

    def _answer(self, request: Request) -> tuple[int, float, int]:
        answer = request.decision
        assert answer is not None, "a request without its router's answer"
        reason = self._reasons.setdefault(answer.reason, len(self._reasons))
        return answer.route, answer.score, reason
