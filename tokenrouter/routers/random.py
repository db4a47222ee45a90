"""High at random: what any selection of the same size must beat.

Shape letters: T tokens in a step.
"""

from tokenrouter.features.base import Dependency
from tokenrouter.features.draws import DRAW_LEVELS, draw_levels
from tokenrouter.routers.base import HIGH, LOW, Router
from tokenrouter.routers.budget import check_frac
from tokenrouter.types import RouteInput, RoutingDecision

_REASONS = ("drawn high", "drawn low")


class RandomRouter(Router):
    """Each token is high with probability ``high_frac``, hashed from (seed, token prefix).

    The same prefix draws the same in any batch, chunk or replay. With one seed the tokens that are
    high at 10 % are among those at 20 %.

    Args:
        high_frac: expected share of high tokens, 0 to 1.
        seed: other seeds draw independently.
    """

    name = "random"
    sees = frozenset({"prefix_hash"})

    def __init__(self, high_frac: float = 0.1, seed: int = 0) -> None:
        self.high_frac = check_frac("high_frac", high_frac)
        self.seed = seed
        self._first_high_level = DRAW_LEVELS - round(self.high_frac * DRAW_LEVELS)

    @property
    def options(self) -> dict[str, object]:
        """Share and seed."""
        return {"high_frac": self.high_frac, "seed": self.seed}

    @property
    def depends_on(self) -> frozenset[Dependency]:
        """The token prefix alone, as the draws are hashed from it."""
        return frozenset({"tokens"})

    @property
    def only_route(self) -> int | None:
        """High at a share of 1, low at 0."""
        return {1.0: HIGH, 0.0: LOW}.get(self.high_frac)

    def route(self, inputs: RouteInput) -> RoutingDecision:
        """High where the draw is among the top ``high_frac``; the score is the draw, in [0, 1)."""
        level_T = draw_levels(inputs.prefix_hash_T, self.seed)
        route_T = (level_T < self._first_high_level).long()  # HIGH is 0, LOW is 1
        score_T = level_T.float() / DRAW_LEVELS
        return RoutingDecision(route_T=route_T, score_T=score_T, reason_T=route_T, reasons=_REASONS)
