"""Which layers a router may decide about together: those of like need, by the labels of a trained router's tokens.

N tokens, L layers, G groups.
"""

import math
from functools import cache

import torch
from torch import Tensor

from tokenrouter.routers.layer_groups import LayerGroups
from tokenrouter.training.losses import MAX_LOG

LEAST_NEED = 1e-3
"""What a layer needs at least, as a multiple of the mean layer."""


def layer_need(score_N: Tensor, label_NL: Tensor) -> Tensor:
    """What each layer needs where tokens need the same, as a multiple of the mean layer: float64 ``[L]``.

    The mean of labels over what the score expects, so that the few neediest tokens, which need all layers, do not
    decide what a layer needs of all others.

    Args:
        score_N: float32, logarithms of the expected label, up to a constant.
        label_NL: float32, 0 or more.
    """
    expected_N = score_N.double().clamp(max=MAX_LOG).exp()
    need_L = (label_NL.double() / expected_N[:, None]).mean(0)
    return (need_L / need_L.mean()).clamp_min(LEAST_NEED)


def group_layers(need_L: Tensor, num_groups: int, first: int = 0) -> LayerGroups:
    """Groups of layers of like need: those whose logarithms differ least from the mean of their group.

    Args:
        need_L: more than 0.
        num_groups: 2 to 8; no more than there are layers.
        first: number of the first layer.

    Raises:
        ValueError: so many groups there cannot be.
    """
    ordered = need_L.log().sort(descending=True, stable=True)
    log_L, order_L = ordered.values.tolist(), (ordered.indices + first).tolist()

    def spread(start: int, stop: int) -> float:
        part = log_L[start:stop]
        middle = sum(part) / len(part)
        return float(sum((value - middle) ** 2 for value in part))

    @cache
    def best(count: int, stop: int) -> tuple[float, tuple[int, ...]]:
        """The least sum of squares of ``count`` groups of the first ``stop`` layers, and where each begins."""
        if count == 1:
            return spread(0, stop), (0,)
        choices = ((best(count - 1, start), start) for start in range(count - 1, stop))
        return min(
            (cost + spread(start, stop), (*starts, start)) for (cost, starts), start in choices
        )

    if not 2 <= num_groups <= len(log_L):
        raise ValueError(f"{num_groups} groups of {len(log_L)} layers: choose 2 to {len(log_L)}")
    starts = best(num_groups, len(log_L))[1]
    parts = [sorted(order_L[a:b]) for a, b in zip(starts, [*starts[1:], len(order_L)], strict=True)]
    offsets = [math.log(float(need_L[torch.tensor(part) - first].mean())) for part in parts]
    found = LayerGroups(tuple(map(tuple, parts)), tuple(offsets))
    found.check(first)
    return found
