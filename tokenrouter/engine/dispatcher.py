"""Which tokens run in which forward of a step. The choice never changes a route.

`mixed`: one forward, every operator on one slice per executor. `queued`: each route's decode tokens wait in a queue of
their own until there are ``min_batch`` of them or one has waited ``max_wait_steps``; the longest queue always runs.
`auto`: one forward; where prompt tokens are in the step, everything (both weight sets are read anyway). In decode the
executor with most tokens runs. The tokens of another wait for company, at most ``max_wait_steps``, while a request that
will run for longer is in the step (so that these requests end no later than it does; the next in the queue for a seat
may start later) and while by the costs measured at start-up their company saves a tenth of the step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tokenrouter.engine.costs import CostModel
from tokenrouter.engine.step import IntArray, PackedStep
from tokenrouter.types import RouteTable

DispatchMode = Literal["auto", "mixed", "queued"]

# `auto`: one in so many tokens of a step is company enough, and what saves less than this share of the whole step's
# token-wise cost is not worth a wait.
COMPANY = 3
MIN_SAVED_FRAC = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Chunk numbers per forward, and the chunks that wait for a later step."""

    forwards: tuple[IntArray, ...]
    deferred: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def running(self) -> IntArray:
        """The chunks of all forwards, in their order."""
        return np.concatenate(self.forwards)


class Dispatcher:
    """Groups a step's chunks into forwards.

    Args:
        table: the routes as they run; ``Route.max_wait_steps`` replaces ``max_wait_steps`` for its own tokens.
        route_executor: per route the executor whose weights it streams most.
        mode: see the module.
        min_batch: decode tokens that run without waiting for more, at least 1; in `auto` a third of the step's tokens,
            where that is more.
        max_wait_steps: the longest wait of a decode token, at least 0.
        costs: of those executors; needed by ``auto`` only.
    """

    def __init__(
        self,
        table: RouteTable,
        route_executor: Sequence[str],
        *,
        mode: DispatchMode = "auto",
        min_batch: int = 4,
        max_wait_steps: int = 4,
        costs: CostModel | None = None,
    ) -> None:
        assert mode != "auto" or costs is not None, "dispatch=auto needs measured costs"
        self.mode = mode
        self.min_batch = min_batch
        self._costs = costs
        self._route_executor = route_executor
        self._max_wait = [
            max_wait_steps if route.max_wait_steps is None else route.max_wait_steps
            for route in table.routes
        ]

    def dispatch(self, step: PackedStep, executed_T: IntArray) -> Work:
        """Groups the chunks of ``step``; tokens of one chunk always run together."""
        everything = np.arange(len(step.requests))
        if self.mode == "mixed":
            return Work(forwards=(everything,))
        route_C = executed_T[step.first_C]
        found, first = np.unique(route_C[step.is_decode_C], return_index=True)
        routes = found[np.argsort(first)].tolist()  # of equally long queues the first one's runs
        has_prompts = not step.is_decode_C.all()
        if not routes or (len(routes) == 1 and not has_prompts):
            return Work(forwards=(everything,))
        queues = {r: np.flatnonzero(step.is_decode_C & (route_C == r)) for r in routes}
        if self.mode == "queued":
            return self._queued(step, queues)
        if has_prompts:
            return Work(forwards=(everything,))
        is_waiting_C = self._waiting(step, queues)
        return Work(
            forwards=(np.flatnonzero(~is_waiting_C),), deferred=np.flatnonzero(is_waiting_C)
        )

    def _queued(self, step: PackedStep, queues: Mapping[int, IntArray]) -> Work:
        """A forward for the prompts, and one for each route that has company or cannot wait."""
        prompts = np.flatnonzero(~step.is_decode_C)
        ready = [of for route, of in queues.items() if self._is_ready(step, route, of)]
        if not len(prompts) and not ready:
            ready = [max(queues.values(), key=len)]
        forwards = (prompts, *ready) if len(prompts) else tuple(ready)
        deferred = np.setdiff1d(np.arange(len(step.requests)), np.concatenate(forwards))
        return Work(forwards=forwards, deferred=deferred)

    def _is_ready(self, step: PackedStep, route: int, of: IntArray) -> bool:
        waited = step.state_C["waited_steps"][of].max()
        return len(of) >= self.min_batch or bool(waited >= self._max_wait[route])

    def _waiting(self, step: PackedStep, queues: Mapping[int, IntArray]) -> NDArray[np.bool_]:
        """`auto` in decode: which chunks better wait for company."""
        assert self._costs is not None
        groups: dict[str, list[IntArray]] = {}
        can_wait: dict[str, bool] = {}
        left_C, waited_C = step.num_left_C, step.state_C["waited_steps"]
        for route, of in queues.items():
            name = self._route_executor[route]
            groups.setdefault(name, []).append(of)
            can_wait_N = (left_C[of] < left_C.max()) & (waited_C[of] < self._max_wait[route])
            can_wait[name] = can_wait.get(name, True) and bool(can_wait_N.all())
        counts = {name: sum(map(len, parts)) for name, parts in groups.items()}
        main = max(counts, key=lambda name: counts[name])
        company = max(self.min_batch, -(-len(left_C) // COMPANY))
        step_s = sum(self._costs.tokenwise_s(name, count) for name, count in counts.items())
        is_waiting_C = np.zeros(len(left_C), np.bool_)
        for name, parts in groups.items():
            if name != main and can_wait[name] and counts[name] < company:
                saved_s = self._costs.saved_s(name, counts[name], company)
                is_waiting_C[np.concatenate(parts)] = saved_s >= MIN_SAVED_FRAC * step_s
        return is_waiting_C
