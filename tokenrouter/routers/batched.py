"""Asks about many tokens at once: a router whose cost is per call is called less often.

Shape letters: T tokens in a step, M those of them that the inner router is asked about.
"""

from collections.abc import Sequence

from tokenrouter.features.base import Dependency
from tokenrouter.routers.answers import AnswerCache
from tokenrouter.routers.base import Router
from tokenrouter.routers.patterns import key_of, masked
from tokenrouter.routers.wrapper import WrapperRouter, check_repeatable, concat, select
from tokenrouter.types import RouteInput, RoutingDecision

_UNKEPT: frozenset[Dependency] = frozenset({"history", "load", "random"})


class BatchedRouter(WrapperRouter):
    """Decides prompts ahead, in blocks of at least ``batch`` tokens; answers are the inner router's own.

    A token must be decided before it runs, so batching can only mean asking early. The tokens of a
    prompt are known early: when a chunk enters a new block of ``batch`` positions, the engine hands over
    the block's rest too (``look_ahead``), one call decides it together with the step's other tokens (of
    all requests), and later chunks find their answers here, under exactly what the inner router sees
    of a token. A generated token is known only when its step begins: it is asked about with its step's
    mates, and no batch can be larger than they are. So this helps where chunks are smaller than
    ``batch`` or many requests prefill at once, and costs the look-up elsewhere.

    Args:
        inner: the router that is asked; None: ``RuleRouter()``.
        batch: tokens of a prompt that are decided at once, at least 2.
        capacity: answers that are kept, at least ``batch``; the least recently used go first, and what
            went is asked again.

    Raises:
        ValueError: a value out of range; ``inner`` depends on history, load or unhashed draws, so that
            an early answer is another; as ``WrapperRouter``.
    """

    name = "batched"

    def __init__(
        self, inner: Router | None = None, batch: int = 64, capacity: int = 65_536
    ) -> None:
        if batch < 2:
            raise ValueError(f"batch={batch} must be at least 2: with 1 nothing is decided ahead")
        if capacity < batch:
            raise ValueError(
                f"capacity={capacity} must be at least batch={batch}: answers get lost"
            )
        super().__init__(inner)
        check_repeatable(self.inner, who=self.name, unkept=_UNKEPT)
        self.batch = batch
        self.capacity = capacity
        self.look_ahead = batch
        self._kept = AnswerCache(capacity)
        self._ahead: list[RouteInput] = []

    @property
    def own_options(self) -> dict[str, object]:
        """Both."""
        return {"batch": self.batch, "capacity": self.capacity}

    def calibrate(self, inputs: Sequence[RouteInput]) -> None:
        """Calibrates the inner router; kept answers go."""
        self.inner.calibrate(inputs)
        self.forget()

    def forget(self) -> None:
        """Empties the cache."""
        self._kept.clear()
        self._ahead.clear()
        self.inner.forget()

    def prepare(self, inputs: RouteInput) -> None:
        """Notes the tokens; they are decided with those of the next ``route``."""
        self._ahead.append(inputs)

    def route(self, inputs: RouteInput) -> RoutingDecision:
        """The kept answers, and one call of the inner router for all others, those ahead included."""
        asked = masked(concat([inputs, *self._ahead]), self.sees)
        self._ahead.clear()
        answer, _ = self._kept.answer(
            key_of(asked),
            lambda index_M: self.inner.route(select(asked, index_M)),
            inputs.ids_T.device,
        )
        num_tokens = len(inputs)
        return RoutingDecision(
            route_T=answer.route_T[:num_tokens],
            score_T=answer.score_T[:num_tokens],
            reason_T=answer.reason_T[:num_tokens],
            reasons=answer.reasons,
        )
