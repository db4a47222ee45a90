"""Groups of layers that a router decides about one by one: each adds what its layers need to a token's score.

A group goes low only where all less needy ones do, so with G groups there are G + 1 routes, and tokens sorted by route
fall into two slices in every layer.

Shape letters: G groups, L layers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tokenrouter.types import Route, RouteTable

MIN_GROUPS, MAX_GROUPS = 2, 8


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Which layers belong together, and what they need.

    Attributes:
        layers: numbers of each group's layers, ascending; the neediest group first; all together are the layers that a
            decision is about.
        offsets: per group what is added to a token's score, in descending order: the logarithm of what its layers need
            in the mean, as a multiple of what a layer needs.
    """

    layers: tuple[tuple[int, ...], ...]
    offsets: tuple[float, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        """How many layers each group has."""
        return tuple(map(len, self.layers))

    @property
    def layer_offsets(self) -> tuple[float, ...]:
        """The offset of each layer that a decision is about, in their order."""
        by_layer = {
            layer: offset
            for group, offset in zip(self.layers, self.offsets, strict=True)
            for layer in group
        }
        return tuple(by_layer[layer] for layer in sorted(by_layer))

    def check(self, first: int) -> None:
        """Raises ValueError unless these are 2 to 8 groups of the layers from ``first`` on, and their offsets."""
        if not MIN_GROUPS <= len(self.layers) <= MAX_GROUPS:
            raise ValueError(
                f"there are {len(self.layers)} groups, and {MIN_GROUPS} to {MAX_GROUPS} are allowed"
            )
        numbers = sorted(layer for group in self.layers for layer in group)
        if numbers != list(range(first, first + len(numbers))) or not all(self.layers):
            raise ValueError(f"{self.layers} do not hold each layer from {first} on once")
        if any(list(group) != sorted(group) for group in self.layers):
            raise ValueError(
                f"{self.layers} name the layers of a group in another than their order"
            )
        if len(self.offsets) != len(self.layers) or not all(map(math.isfinite, self.offsets)):
            raise ValueError(
                f"{self.offsets} are not an offset for each of {len(self.layers)} groups"
            )
        if list(self.offsets) != sorted(self.offsets, reverse=True):
            raise ValueError(f"the offsets {self.offsets} do not descend")

    def routes(self, num_layers: int) -> RouteTable:
        """``high``, then a route per number of groups that still run high, then ``low``.

        ``high_14_layers`` keeps the neediest groups high that have 14 layers together. Layers before the first one that
        is decided about are high in all routes.

        Args:
            num_layers: of the model; where it is deeper than the groups, the rest belongs to the least needy one, and
                layers that it lacks are left out.
        """
        decided = [layer for group in self.layers for layer in group]
        first = min(decided)
        routes = []
        for num_high in range(len(self.layers), -1, -1):
            count = sum(self.widths[:num_high])
            high = {*range(first), *decided[:count]}
            name = (
                f"high_{count}_layers" if 0 < count < len(decided) else "high" if count else "low"
            )
            if name == "high":
                high.update(range(num_layers))
            routes.append(Route.with_high_layers(name, high, num_layers))
        return RouteTable(routes=tuple(routes))


def layer_groups(
    layers: Sequence[Sequence[int]], offsets: Sequence[float], first: int
) -> LayerGroups:
    """Groups as they are stored; raises ValueError where they cannot be.

    Args:
        layers: see LayerGroups.
        offsets: see LayerGroups.
        first: the first layer that a decision is about.
    """
    if not all(type(layer) is int for group in layers for layer in group):
        raise ValueError(f"{layers} holds something else than layer numbers")
    found = LayerGroups(tuple(map(tuple, layers)), tuple(float(offset) for offset in offsets))
    found.check(first)
    return found
