"""Where a token gets its route: once, recorded, and the same in prefill, decode, preemption and recompute.

T tokens of a step.
"""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenrouter.engine.step import IntArray, PackedStep
from tokenrouter.features import FeatureExtractor, sequence_batch
from tokenrouter.routers.base import Router
from tokenrouter.scheduler import UNDECIDED, Request
from tokenrouter.types import Phase, RouteInput, RoutingDecision


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDecision:
    """The routes of a step's tokens.

    Attributes:
        requested_T: what the router asked for.
        executed_T: what runs: the same, but where the pool lacks an executor.
        fresh_T: which tokens were decided in this step.
        decision: the router's own answer for the fresh tokens, None when there were none.
        seconds: time in features and router.
    """

    requested_T: IntArray
    executed_T: IntArray
    fresh_T: NDArray[np.bool_]
    decision: RoutingDecision | None
    seconds: float


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
        self._extractor = extractor
        self._executed_of = executed_of
        self._route_names = route_names
        self._warned = False

    def admit(self, request: Request) -> float:
        """Decides a whole request at once when the router works per request; returns the seconds it took."""
        if self._router.level != "request":
            return 0.0
        started = time.perf_counter()
        batch = sequence_batch(request.history.ids[: request.prompt_len].tolist())
        decision = self._route(self._extractor.extract(batch))
        request.requested_N[:] = int(decision.route_T[0])
        self._warn_if_degraded(request.requested_N[:1])
        return time.perf_counter() - started

    def decide(self, step: PackedStep) -> StepDecision:
        """The routes of the step's tokens, fresh or recorded."""
        started = time.perf_counter()
        requested_T = step.requested_T
        fresh_T = requested_T == UNDECIDED
        decision = None
        if fresh_T.any():
            everything = bool(fresh_T.all())
            batch = (
                step.batch
                if everything
                else step.batch.select(torch.from_numpy(np.flatnonzero(fresh_T)))
            )
            decision = self._route(self._extractor.extract(batch))
            requested_T[fresh_T] = decision.route_T.numpy()
            self._warn_if_degraded(requested_T)
            for c, chunk in enumerate(step.chunks):
                chunk.request.requested_N[chunk.start : chunk.start + chunk.length] = requested_T[
                    step.tokens(c)
                ]
        return StepDecision(
            requested_T=requested_T,
            executed_T=self._executed_of[requested_T],
            fresh_T=fresh_T,
            decision=decision,
            seconds=time.perf_counter() - started,
        )

    def _route(self, inputs: RouteInput) -> RoutingDecision:
        """The router's answer, checked; tokens of phases that it does not decide take route 0."""
        router, num_routes = self._router, len(self._executed_of)
        decision = router.route(inputs)
        if decision.route_T.shape != inputs.ids_T.shape:
            raise ValueError(
                f"router {router.name} decided {len(decision.route_T)} of {len(inputs)} tokens"
            )
        if (
            len(inputs)
            and not 0 <= int(decision.route_T.min()) <= int(decision.route_T.max()) < num_routes
        ):
            raise ValueError(f"router {router.name} answered a route outside 0 .. {num_routes - 1}")
        for phase in set(Phase) - router.phases:
            decision.route_T[inputs.phase_T == phase] = 0
        return decision

    def _warn_if_degraded(self, requested_T: IntArray | NDArray[np.int16]) -> None:
        if self._warned or (self._executed_of[requested_T] == requested_T).all():
            return
        self._warned = True
        asked = self._route_names[
            int(requested_T[self._executed_of[requested_T] != requested_T][0])
        ]
        runs = self._route_names[int(self._executed_of[self._route_names.index(asked)])]
        warnings.warn(
            f"router {self._router.name} asks for route {asked!r}, whose executor the pool does not have: "
            f"its tokens run on {runs!r} (choose another pool, e.g. executor=int8)",
            stacklevel=2,
        )
