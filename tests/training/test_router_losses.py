"""The losses and the measures of order, on labels whose best order is known."""

import math

import pytest
import torch

from tokenrouter.training.losses import (
    LOSSES,
    LossName,
    bce_top_share,
    mean_gain,
    rank_quality,
    regression,
)


def test_measures_of_a_known_order() -> None:
    """Guards against shares counted from the wrong end, and a gain not set off against chance."""
    label_N = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5])
    best = rank_quality(label_N, label_N, 0.2)
    assert best == pytest.approx((1.0, 1.0, 12 / 20, 1.0))
    swapped = rank_quality(label_N[[0, 3, 2, 1, 4, 5, 6, 7, 8, 9]], label_N, 0.2)
    assert swapped.recall_frac == 0.5 and swapped.captured_frac == pytest.approx(9 / 20)
    assert swapped.gain_frac == pytest.approx((9 / 20 - 0.2) / (12 / 20 - 0.2))
    assert rank_quality(-label_N, label_N, 0.2).gain_frac < 0


def test_equal_scores_have_the_auroc_of_chance() -> None:
    """Guards against ranks by position, which make a constant score look good or bad."""
    label_N = torch.rand(50, generator=torch.Generator().manual_seed(0))
    assert rank_quality(torch.zeros(50), label_N, 0.1).auroc == pytest.approx(0.5)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_learns_the_order_of_expected_labels(name: LossName) -> None:
    """Guards against a loss that heavy tails mislead, or one with its sign turned.

    Four kinds of tokens; the second most needy kind has mostly small labels and some huge ones.
    """
    draw = torch.Generator().manual_seed(0)
    expected_K = torch.tensor([0.2, 0.5, 1.0, 3.0])
    kind_N = torch.randint(0, 4, (4000,), generator=draw)
    noise_N = torch.empty(4000).exponential_(generator=draw).square() / 2
    label_N = expected_K[kind_N] * noise_N
    label_N = label_N / label_N.mean()
    cut_S = torch.quantile(label_N, torch.tensor([0.95, 0.9, 0.8]))
    score_K = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.Adam([score_K], lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        LOSSES[name](score_K[kind_N], label_N, cut_S).backward()
        optimizer.step()
    assert score_K.argsort().tolist() == [0, 1, 2, 3]


def test_regression_ends_at_the_logarithm_of_the_mean() -> None:
    """Guards against a score that is not the expected label's, so that budgets of layers cannot be compared."""
    label_N = torch.tensor([0.0, 0.0, 0.0, 8.0])

    def at(value: float) -> float:
        return float(regression(torch.full((4,), value), label_N, torch.empty(0)))

    best = math.log(2.0)
    assert at(best) < at(best + 0.05) and at(best) < at(best - 0.05)


def test_rare_classes_weigh_as_much_as_frequent_ones() -> None:
    """Guards against imbalance: with 5 % positives a constant "no" would be a good answer."""
    label_N = torch.arange(1000.0)
    cut_S = torch.tensor([950.0, 900.0, 800.0])
    is_top_N = label_N >= 900

    def gradient(top: bool) -> float:
        score_N = torch.zeros(1000, requires_grad=True)
        bce_top_share(score_N, label_N, cut_S).backward()
        assert score_N.grad is not None
        return float(score_N.grad[is_top_N if top else ~is_top_N].sum())

    assert gradient(top=True) < 0 < gradient(top=False)
    assert 0.3 < -gradient(top=True) / gradient(top=False) < 3


def test_mean_gain_is_over_the_shares() -> None:
    label_N = torch.rand(200, generator=torch.Generator().manual_seed(1))
    score_N = torch.rand(200, generator=torch.Generator().manual_seed(2))
    gains = [rank_quality(score_N, label_N, share).gain_frac for share in (0.05, 0.1, 0.2)]
    assert mean_gain(score_N, label_N) == pytest.approx(sum(gains) / 3)
