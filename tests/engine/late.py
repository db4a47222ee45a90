"""A router that is asked after the first layers, and looks at the hidden states that they leave."""

from tokenrouter.routers import Router
from tokenrouter.types import RouteInput, RoutingDecision


class LateRouter(Router):
    """High where the largest channel stands out by ``least_crest`` or more."""

    name = "late"
    features = ("hidden_crest",)

    def __init__(self, after_layer: int = 1, least_crest: float = 2.3) -> None:
        self.after_layer = after_layer
        self.least_crest = least_crest

    @property
    def options(self) -> dict[str, object]:
        """Both."""
        return {"after_layer": self.after_layer, "least_crest": self.least_crest}

    def route(self, inputs: RouteInput) -> RoutingDecision:
        """Of the crest alone."""
        score_T = inputs.feature("hidden_crest")
        route_T = (score_T < self.least_crest).long()
        return RoutingDecision(
            route_T=route_T, score_T=score_T, reason_T=route_T, reasons=("stands out", "even")
        )
