"""Of one window: what its entries received in every interval, and what would have been lost there without them.

N tokens of a window, I its whole intervals, G layer groups, Q queries at a time, H query heads, K head size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tokenrouter.training.gradients import DifferentiableDecoder, LayerHeads

LEAST_REST = 0.05
"""Of a query's weights, what is left at least when one entry goes: the others are scaled up by no more than 20."""


class WindowSums(NamedTuple):
    """Per layer group, sums over the queries of each interval.

    Attributes:
        received_GIN: float32 attention weights, mean over heads and the group's layers.
        needed_GIN: float32, see ``window_sums``; summed over the group's layers.
    """

    received_GIN: Tensor
    needed_GIN: Tensor


@torch.no_grad()
def window_sums(
    decoder: DifferentiableDecoder,
    ids_N: Tensor,
    *,
    layer_groups: tuple[int, ...],
    interval: int,
    seed: int,
) -> WindowSums:
    """Runs a window with all its entries and says what each of them was worth to later queries.

    Without entry i, a head's result moves by ``w_i (result - v_i) / (1 - w_i)``. That changes a query's
    log-probabilities by ``e``: the sum over a layer's heads of the inner product with the gradient of the
    log-probability of tokens drawn from the model. Half of ``e ** 2`` is a loss in nats to second order, as in the
    label ``fisher``. No loss grows without end, so ``e ** 2 / (1 + e ** 2)`` counts; single queries would hold most of
    the sum otherwise.

    Products are in bfloat16.

    Args:
        decoder: of the model.
        ids_N: int64; what does not fill an interval is left out.
        layer_groups: per layer the number of its group.
        interval: queries whose values are added up.
        seed: of the drawn tokens.

    Raises:
        ValueError: a length or id that the decoder refuses, or activations that are not finite.
    """
    num_intervals, num_groups = len(ids_N) // interval, max(layer_groups) + 1
    shape = num_groups, num_intervals, num_intervals * interval
    sums = WindowSums(torch.zeros(shape), torch.zeros(shape))
    with torch.autocast("cpu", torch.bfloat16):
        trace = decoder.trace(ids_N[: num_intervals * interval])
        generator = torch.Generator().manual_seed(seed)
        gradient_NE = decoder.drawn_gradients(trace, 1, generator)[0]
        for heads in decoder.attention(trace, gradient_NE):
            _add(sums, layer_groups[heads.layer], heads, interval)
    sizes = torch.tensor([layer_groups.count(group) for group in range(num_groups)])
    return WindowSums(sums.received_GIN / sizes[:, None, None], sums.needed_GIN)


def _add(sums: WindowSums, group: int, heads: LayerHeads, interval: int) -> None:
    """Adds one layer's queries, interval by interval."""
    share = len(heads.q_HNK) // len(heads.k_GNK)
    k_HNK, v_HNK = (x.repeat_interleave(share, 0) for x in (heads.k_GNK, heads.v_GNK))
    own_HN = torch.linalg.vecdot(heads.gradient_HNK.float(), heads.result_HNK.float())
    is_later_QQ = torch.ones(interval, interval, dtype=torch.bool).triu(1)
    for index, first in enumerate(range(0, len(own_HN[0]), interval)):
        stop = first + interval
        q_HQK, gradient_HQK = (x[:, first:stop] for x in (heads.q_HNK, heads.gradient_HNK))
        scores_HQN = (q_HQK @ k_HNK[:, :stop].mT).float() * q_HQK.shape[-1] ** -0.5
        scores_HQN[:, :, first:].masked_fill_(is_later_QQ, -torch.inf)
        weight_HQN = scores_HQN.softmax(-1)
        sums.received_GIN[group, index, :stop] += weight_HQN.mean(0).sum(0)
        effect_HQN = (gradient_HQK @ v_HNK[:, :stop].mT).float() - own_HN[:, first:stop, None]
        effect_HQN *= weight_HQN / (1 - weight_HQN).clamp_min(LEAST_REST)
        square_QN = effect_HQN.sum(0).square()
        sums.needed_GIN[group, index, :stop] += (square_QN / (1 + square_QN)).sum(0)
