"""Every token on the low path: what token routing must beat in quality."""

from tokenrouter.routers.base import LOW, Router
from tokenrouter.types import RouteInput, RoutingDecision


class AllLowRouter(Router):
    """Gives every token the low path."""

    name = "all_low"

    @property
    def options(self) -> dict[str, object]:
        """None."""
        return {}

    @property
    def only_route(self) -> int:
        """Low."""
        return LOW

    def route(self, inputs: RouteInput) -> RoutingDecision:
        """Route low, no score."""
        return RoutingDecision.constant(LOW, len(inputs), "all tokens low", inputs.ids_T.device)
