"""How a score learns to put the needy tokens first, and how well it does.

Labels have heavy tails, and what counts is the sum of the labels of the tokens that go high. All three losses are least
for a score that orders tokens by their expected label, or by the chance to be among the top.

N tokens, or pairs of a token and a group of layers; S shares.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LossName = Literal["regression", "ranking", "bce_top_share"]
SHARES = (0.05, 0.1, 0.2)
"""Shares of high tokens that a router is trained and judged for."""
MAX_LOG = 12.0
"""The largest score that is exponentiated; labels are multiples of their mean."""
PAIRINGS = 8
"""With how many others each token of a batch is compared."""


def regression(score_N: Tensor, label_N: Tensor, cut_S: Tensor, weight_N: Tensor) -> Tensor:
    """Poisson deviance: the exponential of the score approaches the expected label, whatever its tails.

    Args:
        score_N: float32.
        label_N: float32, multiples of the mean label, 0 or more.
        cut_S: labels of the top shares begin here; not used.
        weight_N: float32, of each in the mean; 1 on average.
    """
    return ((score_N.clamp(max=MAX_LOG).exp() - label_N * score_N) * weight_N).mean()


def ranking(score_N: Tensor, label_N: Tensor, cut_S: Tensor, weight_N: Tensor) -> Tensor:
    """Pairwise logistic loss, each pair weighed by how much there is to lose: the difference of its labels.

    Burges et al. 2005 (RankNet). Each token is paired with its neighbours in the batch, which is shuffled.
    """
    total = score_N.new_zeros(())
    for shift in range(1, min(PAIRINGS, len(score_N) - 1) + 1):
        gap_N = label_N - label_N.roll(shift)
        margin_N = (score_N - score_N.roll(shift)) * gap_N.sign()
        pair_N = weight_N * weight_N.roll(shift)
        total = total + (F.softplus(-margin_N) * gap_N.abs() * pair_N).mean()
    return total / PAIRINGS


def bce_top_share(score_N: Tensor, label_N: Tensor, cut_S: Tensor, weight_N: Tensor) -> Tensor:
    """Is the token among the top 5, 10, 20 %? Binary cross-entropy of all shares, classes weighed equally."""
    share_S = torch.tensor(SHARES)
    is_top_NS = (label_N[:, None] >= cut_S).float()
    offset_S = torch.log(share_S[1] / share_S)  # the rarer the class, the higher its threshold
    weight_S = (1 - share_S) / share_S
    logits_NS = score_N[:, None] - offset_S
    losses = F.binary_cross_entropy_with_logits(
        logits_NS, is_top_NS, pos_weight=weight_S, reduction="none"
    )
    return (losses * weight_N[:, None]).mean()


LOSSES: Mapping[LossName, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "regression": regression,
    "ranking": ranking,
    "bce_top_share": bce_top_share,
}


class Ranked(NamedTuple):
    """How well a score finds the tokens with large labels, at one share of high tokens.

    Attributes:
        auroc: chance that a token of the top share scores above one that is not; 0.5 is luck.
        recall_frac: of the top share's tokens, those that are among the top by score.
        captured_frac: of the sum of all labels, what the top by score holds.
        gain_frac: what is captured beyond a random choice, of what the labels themselves would capture beyond it.
    """

    auroc: float
    recall_frac: float
    captured_frac: float
    gain_frac: float


def rank_quality(score_N: Tensor, label_N: Tensor, share: float) -> Ranked:
    """Quality of ``score_N`` where ``share`` of the tokens go high.

    Args:
        score_N: float32, larger goes high first.
        label_N: float32, 0 or more, not all the same.
        share: above 0 and under 1.
    """
    count = min(max(round(share * len(score_N)), 1), len(score_N) - 1)
    by_score, by_label = (x.argsort(descending=True, stable=True) for x in (score_N, label_N))
    is_top_N = torch.zeros(len(label_N), dtype=torch.bool)
    is_top_N[by_label[:count]] = True
    total = label_N.double().sum()
    captured = float(label_N[by_score[:count]].double().sum() / total)
    best = float(label_N[by_label[:count]].double().sum() / total)
    by_chance = count / len(score_N)
    return Ranked(
        auroc=_auroc(score_N, is_top_N),
        recall_frac=float(is_top_N[by_score[:count]].float().mean()),
        captured_frac=captured,
        gain_frac=(captured - by_chance) / (best - by_chance),
    )


def mean_gain(score_N: Tensor, label_N: Tensor, shares: Sequence[float] = SHARES) -> float:
    """Mean of ``gain_frac`` over ``shares``."""
    return sum(rank_quality(score_N, label_N, share).gain_frac for share in shares) / len(shares)


def _auroc(score_N: Tensor, is_top_N: Tensor) -> float:
    """By the mean rank of the top ones; equal scores share their mean rank."""
    _, inverse_N, counts = score_N.unique(return_inverse=True, return_counts=True)
    rank_of_value = counts.cumsum(0).double() - (counts.double() - 1) / 2
    num_top = int(is_top_N.sum())
    num_other = len(score_N) - num_top
    rank_sum = float(rank_of_value[inverse_N][is_top_N].sum())
    return (rank_sum - num_top * (num_top + 1) / 2) / (num_top * num_other)
