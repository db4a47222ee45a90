"""How well a router finds the tokens that need the high path, and how sure that is.

A share of an oracle's gain is a ratio of means over windows. Its interval comes from drawing the windows again with
replacement (Efron 1979, the bootstrap), all numbers of a window together, so that what windows have in common cancels.

N tokens of a window, W windows, D draws of the bootstrap.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

NEEDY_FRAC = 0.1
"""The share of a window's tokens, those with the largest labels, that a score is to rank above the others."""
CONFIDENCE = 0.9
Verdict = Literal["better", "tie", "worse"]


class Interval(NamedTuple):
    """A number and where 90 % of its bootstrap draws lie; NaN where it is not defined."""

    value: float
    low: float
    high: float


def as_values(interval: Interval) -> dict[str, float | None]:
    """Value, low and high for JSON, which has no NaN: None where one is not defined."""
    return {
        name: value if math.isfinite(value) else None for name, value in interval._asdict().items()
    }


def top_share(score_N: Tensor, share: float) -> Tensor:
    """Bool ``[N]``: the ``round(share * N)`` largest scores, the earlier token first among equal ones.

    Args:
        score_N: any real dtype, no NaN.
        share: 0 to 1.

    Raises:
        ValueError: ``share`` is out of range.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"a share of tokens lies in 0 to 1, got {share}")
    is_top_N = torch.zeros(len(score_N), dtype=torch.bool)
    order_N = score_N.argsort(descending=True, stable=True)
    is_top_N[order_N[: round(share * len(score_N))]] = True
    return is_top_N


def auroc(score_N: Tensor, is_needy_N: Tensor) -> float:
    """Probability that a needy token scores above another one, equal scores counting one half (Mann and Whitney 1947).

    Args:
        score_N: real, no NaN.
        is_needy_N: bool.

    Returns:
        0 to 1, 0.5 for a score that says nothing; NaN where all tokens are needy or none is.
    """
    values, rank_N = score_N.unique(return_inverse=True)
    num_needy = torch.zeros(len(values), dtype=torch.float64).index_add_(
        0, rank_N, is_needy_N.double()
    )
    num_other = rank_N.bincount(minlength=len(values)) - num_needy
    below = num_other.cumsum(0) - num_other
    pairs = num_needy.sum() * num_other.sum()
    return float((num_needy * (below + num_other / 2)).sum() / pairs)


def recall(is_high_N: Tensor, is_needy_N: Tensor) -> float:
    """Share of the needy tokens that go high; NaN where none is needy.

    Args:
        is_high_N: bool.
        is_needy_N: bool.
    """
    return float((is_high_N & is_needy_N).sum() / is_needy_N.sum())


def gain_share(kl_random: Tensor, kl_router: Tensor, kl_oracle: Tensor) -> Tensor:
    """What part of an oracle's gain over random a router has: 0 like random, 1 like the oracle.

    Args:
        kl_random: mean KL in nats.
        kl_router: the same at the same share of high tokens, of the same shape.
        kl_oracle: the same.

    Returns:
        Of that shape; NaN where the oracle gains nothing.
    """
    gain = kl_random - kl_oracle
    return ((kl_random - kl_router) / gain).masked_fill(gain <= 0, float("nan"))


def ratio(value: Tensor, other: Tensor) -> Tensor:
    """``value / other``, for ``Bootstrap.interval``."""
    return value / other


def difference(value: Tensor, other: Tensor) -> Tensor:
    """``value - other``, for ``Bootstrap.interval``."""
    return value - other


def mean(value: Tensor) -> Tensor:
    """``value`` itself, for ``Bootstrap.interval``."""
    return value


def interval_of(value: float, drawn_D: Tensor) -> Interval:
    """``value`` and where 90 % of ``drawn_D`` (float64) lie, without those that are not defined."""
    tail = (1 - CONFIDENCE) / 2
    low, high = drawn_D.nanquantile(torch.tensor([tail, 1 - tail]).double()).tolist()
    return Interval(value, low, high)


def verdict_of(difference: Interval) -> Verdict:
    """What the difference of a KL and another one means; a tie where its interval holds 0."""
    if difference.high < 0:
        return "better"
    return "worse" if difference.low > 0 else "tie"


class Bootstrap:
    """Windows drawn again with replacement, the same draws for every number.

    Args:
        num_windows: at least 2.
        draws: of all windows.
        seed: of the draws.

    Raises:
        ValueError: fewer than two windows, which say nothing about a spread.
    """

    def __init__(self, num_windows: int, *, draws: int = 2000, seed: int = 0) -> None:
        if num_windows < 2:
            raise ValueError(
                f"an interval over windows needs at least 2 of them, got {num_windows}: measure more windows"
            )
        generator = torch.Generator().manual_seed(seed)
        self._index_DW = torch.randint(num_windows, (draws, num_windows), generator=generator)

    def interval(self, function: Callable[..., Tensor], *values_W: Tensor) -> Interval:
        """A function of means over windows.

        Args:
            function: of one mean per argument, elementwise, such as ``gain_share``.
            values_W: per argument a number per window, float ``[W]``.

        Raises:
            ValueError: another number of windows.
        """
        value = function(*(value_W.double().mean() for value_W in values_W))
        return interval_of(float(value), function(*(self.means(v_W) for v_W in values_W)))

    def means(self, value_W: Tensor) -> Tensor:
        """The mean of each draw, float64 ``[D]``.

        Args:
            value_W: a number per window, float ``[W]``.

        Raises:
            ValueError: another number of windows.
        """
        num_windows = self._index_DW.shape[1]
        if len(value_W) != num_windows:
            raise ValueError(
                f"the intervals are over {num_windows} windows, got {len(value_W)} values"
            )
        return value_W.double()[self._index_DW].mean(1)

    def verdict(self, kl_W: Tensor, other_W: Tensor) -> Verdict:
        """Whether a KL is smaller than another one, window by window; inside the interval they tie.

        Args:
            kl_W: mean KL in nats per window, ``[W]``.
            other_W: what it is compared with.
        """
        return verdict_of(self.interval(difference, kl_W, other_W))
