"""Asks once for tokens that look the same.

Shape letters: T tokens in a step, M those of them that the inner router is asked about.
"""

from collections.abc import Sequence
from typing import Literal, get_args

from tokenrouter.features.base import Dependency
from tokenrouter.routers.answers import AnswerCache, CacheCounts
from tokenrouter.routers.base import Router
from tokenrouter.routers.patterns import Rounding, key_of, masked, rounded
from tokenrouter.routers.wrapper import WrapperRouter, check_repeatable, select
from tokenrouter.types import RouteInput, RoutingDecision

Key = Literal["pattern", "exact"]
_UNKEPT: frozenset[Dependency] = frozenset({"logits", "history", "load", "random"})


class CachedRouter(WrapperRouter):
    """Keeps the inner router's answers under what it sees of a token.

    With ``key=pattern`` a token is replaced by its pattern before the inner router sees it: positions
    and quantities without a bound (distances, repeats; no ids) are rounded to steps that grow with them,
    what the inner router does not see is left out, and hashed draws are the pattern's. The answer is a function
    of the pattern alone, so that it is the same whichever token came first, and after any eviction; it
    may differ from the inner router's own where rounding matters. With ``key=exact`` nothing is rounded
    and answers are the inner router's own; a router that draws by prefixes then hits on shared ones only.

    A repeated pattern saves the inner router's work, not that of its features.

    Args:
        inner: the router that answers; None: ``RuleRouter()``.
        key: ``pattern`` or ``exact``.
        exact_below: numbers below it are not rounded; of ``key=pattern``, as the next.
        steps_per_octave: steps from a number to its double, for those that are.
        capacity: answers that are kept, at least 8; the least recently used go first.

    Raises:
        ValueError: a value out of range; ``inner`` depends on logits, history, load or unhashed draws,
            or with ``key=pattern`` on draws by prefix alone; as ``WrapperRouter``.
    """

    name = "cached"

    def __init__(
        self,
        inner: Router | None = None,
        key: Key = "pattern",
        exact_below: int = 16,
        steps_per_octave: int = 2,
        capacity: int = 65_536,
    ) -> None:
        if key not in get_args(Key):
            raise ValueError(f"key={key!r} is neither 'pattern' nor 'exact'")
        super().__init__(inner)
        check_repeatable(self.inner, who=self.name, unkept=_UNKEPT)
        if key == "pattern" and not self.features and self.sees == {"prefix_hash"}:
            raise ValueError(
                f"{self.inner.name!r} draws by a token's whole prefix, which a pattern does not hold: "
                "use key=exact, or another inner router"
            )
        self.key: Key = key
        self.exact_below = exact_below
        self.steps_per_octave = steps_per_octave
        self.capacity = capacity
        self._rounding = Rounding(exact_below, steps_per_octave)
        self._kept = AnswerCache(capacity)
        self._counts = CacheCounts()

    @property
    def own_options(self) -> dict[str, object]:
        """All of them."""
        return {
            "key": self.key,
            "exact_below": self.exact_below,
            "steps_per_octave": self.steps_per_octave,
            "capacity": self.capacity,
        }

    @property
    def depends_on(self) -> frozenset[Dependency]:
        """As the inner router; a pattern has its phase, too."""
        return self.inner.depends_on | ({"phase"} if self.key == "pattern" else frozenset())

    @property
    def cache_counts(self) -> CacheCounts:
        """Tokens looked up, and those that the inner router was not asked about."""
        return self._counts

    def calibrate(self, inputs: Sequence[RouteInput]) -> None:
        """On what the inner router will see; kept answers go."""
        self.inner.calibrate([self._meant(part) for part in inputs])
        self.forget()

    def forget(self) -> None:
        """Empties the cache."""
        self._kept.clear()
        self.inner.forget()

    def route(self, inputs: RouteInput) -> RoutingDecision:
        """The kept answer of every token's key, or the inner router's for the key."""
        meant = self._meant(inputs)
        answer, num_spared = self._kept.answer(
            key_of(meant),
            lambda index_M: self.inner.route(select(meant, index_M)),
            inputs.ids_T.device,
        )
        self._counts.lookups += len(inputs)
        self._counts.hits += num_spared
        return answer

    def _meant(self, inputs: RouteInput) -> RouteInput:
        """What the inner router is asked in place of ``inputs``."""
        if self.key == "exact":
            return masked(inputs, self.sees)
        return rounded(inputs, self.sees, self._rounding)
