"""Guards the numbers that routers are compared by: ranks with ties, shares that are exact, intervals that are paired.

N tokens, W windows.
"""

import math

import pytest
import torch
from torch import Tensor

from tokenrouter.evaluation.router_scores import (
    Bootstrap,
    Interval,
    as_values,
    auroc,
    difference,
    gain_share,
    mean,
    recall,
    top_share,
)


def drawn(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def test_auroc_counts_pairs_and_ties_half() -> None:
    """Ranks from an unstable sort, which give equal scores an order and a useless score more than one half."""
    score_N, is_needy_N = (drawn(60) * 8).floor(), drawn(60, 1) < 0.3
    needy, other = score_N[is_needy_N][:, None], score_N[~is_needy_N]
    pairs = (needy > other).double() + 0.5 * (needy == other).double()
    assert auroc(score_N, is_needy_N) == pytest.approx(float(pairs.mean()))
    assert auroc(torch.zeros(60), is_needy_N) == 0.5
    assert auroc(is_needy_N.float(), is_needy_N) == 1.0 != auroc(-score_N, is_needy_N)
    assert math.isnan(auroc(score_N, torch.zeros(60, dtype=torch.bool)))


def test_the_top_share_is_exact_even_among_equal_scores() -> None:
    """A threshold at the quantile, which lets every equal score pass and so more than the share."""
    is_top_N = top_share(torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0]), 0.4)
    assert is_top_N.tolist() == [True, True, False, False, False]
    assert [int(top_share(drawn(40), share).sum()) for share in (0.0, 0.05, 1.0)] == [0, 2, 40]
    with pytest.raises(ValueError, match=r"0 to 1, got 1.5"):
        top_share(drawn(4), 1.5)


def test_recall_is_over_the_needy_and_not_over_the_high() -> None:
    """Precision in its place: equal at equal counts, and only there."""
    is_high_N = torch.tensor([True, False, False, False])
    is_needy_N = torch.tensor([True, True, False, False])
    assert recall(is_high_N, is_needy_N) == 0.5 and recall(is_needy_N, is_high_N) == 1.0


def test_a_gain_share_is_of_means_and_undefined_without_a_gain() -> None:
    """A mean of the windows' ratios, in which a window with next to no gain outweighs all others; a division by 0."""
    random_W, router_W = torch.tensor([1.0, 0.011]), torch.tensor([0.6, 0.1])
    oracle_W = torch.tensor([0.5, 0.01])
    found = Bootstrap(2).interval(gain_share, random_W, router_W, oracle_W)
    assert found.value == pytest.approx((1.011 - 0.7) / (1.011 - 0.51))
    assert found.low < found.value < found.high
    assert math.isnan(gain_share(torch.tensor(1.0), torch.tensor(0.5), torch.tensor(1.0)))


def test_intervals_are_as_wide_as_theory_has_them() -> None:
    """Tails of 10 % each, or draws of single values where whole windows are meant."""
    value_W = torch.randn(400, generator=torch.Generator().manual_seed(2)).double()
    found = Bootstrap(400).interval(mean, value_W)
    half = 1.645 * float(value_W.std()) / 400**0.5
    assert found.high - found.value == pytest.approx(half, rel=0.1)
    assert found.value - found.low == pytest.approx(half, rel=0.1)


def test_what_windows_share_does_not_make_a_tie() -> None:
    """Intervals drawn per router: windows differ by far more than routers do."""
    hard_W = 10 * drawn(12)
    bootstrap = Bootstrap(12)
    assert bootstrap.verdict(hard_W, hard_W + 0.01 + 0.001 * drawn(12, 1)) == "better"
    assert bootstrap.verdict(hard_W + 0.01, hard_W) == "worse"
    assert bootstrap.verdict(hard_W, hard_W + drawn(12, 1) - drawn(12, 1).mean()) == "tie"


def test_equal_calls_have_equal_intervals() -> None:
    """A draw from the global generator, after which no result repeats."""
    first, again = (Bootstrap(5).interval(difference, drawn(5), drawn(5, 1)) for _ in range(2))
    assert first == again


def test_one_window_and_windows_of_another_run_are_refused() -> None:
    """An interval of no width, by which every difference is certain."""
    with pytest.raises(ValueError, match="at least 2 of them, got 1: measure more windows"):
        Bootstrap(1)
    with pytest.raises(ValueError, match="over 3 windows, got 2 values"):
        Bootstrap(3).interval(difference, drawn(3), drawn(2))


def test_what_is_not_defined_is_null() -> None:
    """NaN in a JSON object, which most readers refuse as a whole."""
    assert as_values(Interval(0.5, math.nan, math.inf)) == {"value": 0.5, "low": None, "high": None}
