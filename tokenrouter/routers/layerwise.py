"""A fixed mixed-precision map, the same for every token: what a token router must beat."""

from collections.abc import Sequence
from itertools import groupby

from tokenrouter.routers.base import Router
from tokenrouter.types import LayerSpan, Route, RouteInput, RouteTable, RoutingDecision


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
        spans = []
        for is_high, run in groupby(range(num_layers), high.__contains__):
            layers = list(run)
            spans.append(LayerSpan(layers[0], layers[-1] + 1, "high" if is_high else "low"))
        return RouteTable(routes=(Route(name=self.name, spans=tuple(spans)),))

    def route(self, inputs: RouteInput) -> RoutingDecision:
        """The only route; no score."""
        return RoutingDecision.constant(0, len(inputs), "fixed layer map", inputs.ids_T.device)
