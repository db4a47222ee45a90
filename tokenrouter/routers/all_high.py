"""Every token on the high path: what token routing must speed up."""

from tokenrouter.routers.base import HIGH, Router
from tokenrouter.types import RouteInput, RoutingDecision


class AllHighRouter(Router):
    """Gives every token the high path."""

    name = "all_high"

    @property
    def options(self) -> dict[str, object]:
        """None."""
        return {}

    @property
    def only_route(self) -> int:
        """High."""
        return HIGH

    def route(self, inputs: RouteInput) -> RoutingDecision:
        """Route high, no score."""
        return RoutingDecision.constant(HIGH, len(inputs), "all tokens high", inputs.ids_T.device)
