"""A fixed mixed-precision map, the same for every token: what a token router must beat."""

from collections.abc import Sequence

from tokenrouter.routers.base import Router
from tokenrouter.types import Route, RouteInput, RouteTable, RoutingDecision


class LayerwiseRouter(Router):
    """Every token runs the given layers on the high executor and the others on the low one.

    Args:
        high_layers: layer numbers; negative ones count from the end.
    """

    name = "layerwise"

    def __init__(self, high_layers: Sequence[int] = (0, 1, -2, -1)) -> None:
        self.high_layers = tuple(int(layer) for layer in high_layers)

    @property
    def options(self) -> dict[str, object]:
        """The layers as given."""
        return {"high_layers": self.high_layers}

    @property
    def only_route(self) -> int:
        """The map."""
        return 0

    def routes(self, num_layers: int) -> RouteTable:
        """One route; raises ValueError when a layer does not exist."""
        wrong = [layer for layer in self.high_layers if not -num_layers <= layer < num_layers]
        if wrong:
            raise ValueError(
                f"high_layers {wrong} do not exist: {-num_layers} to {num_layers - 1} are allowed"
            )
        high = {layer % num_layers for layer in self.high_layers}
        return RouteTable(routes=(Route.with_high_layers(self.name, high, num_layers),))

    def route(self, inputs: RouteInput) -> RoutingDecision:
        """The only route; no score."""
        return RoutingDecision.constant(0, len(inputs), "fixed layer map", inputs.ids_T.device)
