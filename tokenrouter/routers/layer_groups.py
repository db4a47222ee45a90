"""Groups of neighbouring layers that a router decides about one by one, and the routes that this makes.

A group is a range of layers, ``(start, stop)`` half-open; all groups together are the layers that a decision is about.

Shape letters: T tokens, G groups, L layers that a decision is about.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise

from torch import Tensor

from tokenrouter.types import LayerSpan, Route, RouteTable

Groups = tuple[tuple[int, int], ...]
MIN_GROUPS, MAX_GROUPS = 2, 4


def check_groups(groups: Sequence[Sequence[int]], *, first: int, stop: int) -> Groups:
    """``groups`` as tuples.

    Args:
        groups: as given.
        first: layer that the first one must begin with: the first that a decision is about.
        stop: where the last one must end: the number of layers.

    Raises:
        ValueError: they are not 2 to 4 ranges that follow each other from ``first`` to ``stop``.
    """
    if not all(len(group) == 2 and all(type(x) is int for x in group) for group in groups):
        raise ValueError(f"{groups} holds something else than pairs of layer numbers [start, stop]")
    found = tuple((group[0], group[1]) for group in groups)
    if not MIN_GROUPS <= len(found) <= MAX_GROUPS:
        raise ValueError(
            f"{groups} has {len(found)} groups, and {MIN_GROUPS} to {MAX_GROUPS} are allowed"
        )
    follows = all(one[1] == other[0] for one, other in pairwise(found))
    if not follows or (found[0][0], found[-1][1]) != (first, stop) or any(a >= b for a, b in found):
        raise ValueError(
            f"{groups} must be ranges [start, stop) that follow each other from layer {first} to {stop}"
        )
    return found


def widths(groups: Groups | None) -> tuple[int, ...]:
    """How much each group of a decision weighs, its number of layers; ``(1,)`` where it is about all layers at once."""
    return (1,) if groups is None else tuple(stop - start for start, stop in groups)


def per_layer(value_TG: Tensor, width_G: Tensor) -> Tensor:
    """Values of tokens' groups of layers, each as often as the group has layers, ``[T, L]``.

    So a share of what this gives is a share of the work.

    Args:
        value_TG: scores, or labels that are means over a group's layers.
        width_G: int64, layers of each group.
    """
    return value_TG.repeat_interleave(width_G, 1)


def group_routes(groups: Groups, num_layers: int) -> RouteTable:
    """A route per subset of the groups: bit g of its index says that group g runs low.

    So the first one is ``high`` and the last one ``low``; between, ``high_0_5+28_30`` keeps layers 0 to 4, 28 and 29
    high. Layers before the first group are high in all of them.

    Args:
        groups: of ``check_groups``.
        num_layers: of the model; where it is deeper than the groups, the last one goes on to the end.
    """
    stops = [*(stop for _, stop in groups[:-1]), num_layers]
    ranges = [(start, stop) for (start, _), stop in zip(groups, stops, strict=True)]
    last = 2 ** len(groups) - 1
    return RouteTable(
        routes=tuple(
            Route(name=_name(groups, index, last), spans=_spans(ranges, index))
            for index in range(last + 1)
        )
    )


def _name(groups: Groups, index: int, last: int) -> str:
    if index in (0, last):
        return "low" if index else "high"
    high = [f"{a}_{b}" for g, (a, b) in enumerate(groups) if not index >> g & 1]
    return f"high_{'+'.join(high)}"


def _spans(ranges: Sequence[tuple[int, int]], index: int) -> tuple[LayerSpan, ...]:
    paths = [(a, b, "low" if index >> g & 1 else "high") for g, (a, b) in enumerate(ranges)]
    if first := ranges[0][0]:
        paths.insert(0, (0, first, "high"))
    runs = [list(run) for _, run in groupby(paths, key=lambda path: path[2])]
    return tuple(LayerSpan(run[0][0], run[-1][1], run[0][2]) for run in runs)
