"""Which tokens run in which forward of a step. The choice never changes a route.

`mixed`: one forward, every operator on one slice per executor. `queued`: each route's decode tokens wait in a queue of
their own until there are ``min_batch`` of them or one has waited ``max_wait_steps``; the longest queue always runs.
`auto`: one forward; where prompt tokens are in the step, everything (both weight sets are read anyway). In decode the
executor with most tokens runs. The tokens of another wait for company, at most ``max_wait_steps``, while a request that
will run for longer is in the step (so that these requests end no later than it does; the next in the queue for a seat
may start later) and while by the costs measured at start-up their company saves a tenth of the step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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

    forwards: tuple[tuple[int, ...], ...]
    deferred: tuple[int, ...] = ()

    @property
    def running(self) -> list[int]:
        """The chunks of all forwards, in their order."""
        return [c for chunks in self.forwards for c in chunks]


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
        everything = tuple(range(len(step.chunks)))
        if self.mode == "mixed":
            return Work(forwards=(everything,))
        queues: dict[int, list[int]] = {}
        for c in everything:
            if step.chunks[c].request.decoding:
                queues.setdefault(int(executed_T[step.first_C[c]]), []).append(c)
        num_prompts = len(everything) - sum(map(len, queues.values()))
        if not queues or (len(queues) == 1 and not num_prompts):
            return Work(forwards=(everything,))
        if self.mode == "auto":
            waiting = set() if num_prompts else self._waiting(step, queues)
            running = tuple(c for c in everything if c not in waiting)
            return Work(forwards=(running,), deferred=tuple(sorted(waiting)))
        return self._queued(step, queues)

    def _queued(self, step: PackedStep, queues: Mapping[int, Sequence[int]]) -> Work:
        """A forward for the prompts, and one for each route that has company or cannot wait."""
        prompts = tuple(c for c, chunk in enumerate(step.chunks) if not chunk.request.decoding)
        ready = [chunks for route, chunks in queues.items() if self._is_ready(step, route, chunks)]
        if not prompts and not ready:
            ready = [max(queues.values(), key=len)]
        running = {c for chunks in ready for c in chunks}
        deferred = tuple(c for chunks in queues.values() for c in chunks if c not in running)
        forwards = [tuple(chunks) for chunks in ready]
        return Work(
            forwards=(prompts, *forwards) if prompts else tuple(forwards), deferred=deferred
        )

    def _is_ready(self, step: PackedStep, route: int, chunks: Sequence[int]) -> bool:
        waited = max(step.chunks[c].request.waited_steps for c in chunks)
        return len(chunks) >= self.min_batch or waited >= self._max_wait[route]

    def _waiting(self, step: PackedStep, queues: Mapping[int, Sequence[int]]) -> set[int]:
        """`auto` in decode: the chunks that better wait for company."""
        assert self._costs is not None
        groups: dict[str, list[int]] = {}
        can_wait: dict[str, bool] = {}
        left = [chunk.request.num_left for chunk in step.chunks]
        longest = max(left)
        for route, chunks in queues.items():
            name, bound = self._route_executor[route], self._max_wait[route]
            groups.setdefault(name, []).extend(chunks)
            can_wait[name] = can_wait.get(name, True) and all(
                left[c] < longest and step.chunks[c].request.waited_steps < bound for c in chunks
            )
        main = max(groups, key=lambda name: len(groups[name]))
        company = max(self.min_batch, -(-len(left) // COMPANY))
        step_s = sum(self._costs.tokenwise_s(name, len(chunks)) for name, chunks in groups.items())
        waiting: set[int] = set()
        for name, chunks in groups.items():
            if name != main and can_wait[name] and len(chunks) < company:
                saved_s = self._costs.saved_s(name, len(chunks), company)
                waiting.update(chunks if saved_s >= MIN_SAVED_FRAC * step_s else ())
        return waiting
