"""Which tokens run in which forward of a step. The choice never changes a route.

`mixed`: one forward, every operator on one slice per executor. `queued`: each route's decode tokens wait in a queue of
their own until there are ``min_batch`` of them or one has waited ``max_wait_steps``; the longest queue always runs.
`auto`: mixed whenever prompt tokens are in the step (both weight sets are read anyway), otherwise what costs less.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tokenrouter.engine.costs import CostModel
from tokenrouter.engine.step import IntArray, PackedStep
from tokenrouter.types import RouteTable

DispatchMode = Literal["auto", "mixed", "queued"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Chunk numbers per forward, and the chunks that wait for a later step."""

    forwards: tuple[tuple[int, ...], ...]
    deferred: tuple[int, ...] = ()


class Dispatcher:
    """Groups a step's chunks into forwards.

    Args:
        table: the routes as they run; ``Route.max_wait_steps`` replaces ``max_wait_steps`` for its own tokens.
        route_executor: per route the executor whose weights it streams most.
        mode: see the module.
        min_batch: decode tokens that run without waiting for more, at least 1.
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
        prompt = tuple(c for c in everything if not step.chunks[c].request.decoding)
        queues: dict[int, list[int]] = {}
        for c in everything:
            if step.chunks[c].request.decoding:
                queues.setdefault(int(executed_T[step.offsets_C[c]]), []).append(c)
        if self._mixes(prompt, queues):
            return Work(forwards=(everything,))
        ready = [chunks for route, chunks in queues.items() if self._is_ready(step, route, chunks)]
        if not prompt and not ready:
            ready = [max(queues.values(), key=len)]
        running = {c for chunks in ready for c in chunks}
        deferred = tuple(c for chunks in queues.values() for c in chunks if c not in running)
        forwards = [tuple(chunks) for chunks in ready]
        return Work(forwards=(prompt, *forwards) if prompt else tuple(forwards), deferred=deferred)

    def _mixes(self, prompt: tuple[int, ...], queues: dict[int, list[int]]) -> bool:
        if self.mode == "mixed" or (len(queues) < 2 and not prompt):
            return True
        if self.mode == "queued":
            return not queues
        assert self._costs is not None
        if prompt:
            return True
        tokens: dict[str, int] = {}
        for route, chunks in queues.items():
            name = self._route_executor[route]
            tokens[name] = tokens.get(name, 0) + len(chunks)
        return not self._costs.queueing_pays(tokens, self.min_batch, max(self._max_wait))

    def _is_ready(self, step: PackedStep, route: int, chunks: list[int]) -> bool:
        waited = max(step.chunks[c].request.waited_steps for c in chunks)
        return len(chunks) >= self.min_batch or waited >= self._max_wait[route]
