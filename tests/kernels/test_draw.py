"""Guards the draw of random tokens: another distribution than the softmax, masked tokens, results that threads, batch
mates or the width of a row change."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Typed
from tokenrouter.kernels import NativeKernels, ReferenceKernels

INF, NAN = math.inf, math.nan
LAST = 1 - 2**-53  # the largest float64 below 1
WIDTHS = [1, 2, 15, 16, 17, 511, 512, 513, 4095, 4096, 4097, 9000]


def cdf_of(x_TV: Tensor, inverse_temperature_T: Tensor) -> Tensor:
    """Cumulative probabilities ``[T, V]``, float64."""
    scaled_TV = x_TV.double() * inverse_temperature_T.double().unsqueeze(1)
    return scaled_TV.softmax(dim=-1).cumsum(dim=-1)


def random_rows(num_rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with some masked, inverse temperatures of 0.3 to 3, and numbers from end to end."""
    torch.manual_seed(width)
    wide_TX = torch.full((num_rows, width + 7), 1e4).to(dtype)
    x_TV = wide_TX[:, 3 : 3 + width].copy_(torch.randn(num_rows, width) * 3)
    x_TV[torch.rand(num_rows, width) < 0.2] = -INF
    x_TV[:, width // 2] = 1.0
    inverse_T = torch.rand(num_rows) * 2.7 + 0.3
    uniform_T = torch.rand(num_rows, dtype=torch.float64)
    uniform_T[:3] = torch.tensor([0.0, LAST, 0.5], dtype=torch.float64)
    return x_TV, inverse_T, uniform_T


def boundaries(num_rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """As ``random_rows``; the numbers lie between two indices, where sums of another order choose the other one."""
    x_TV, inverse_T, _ = random_rows(num_rows, width, dtype)
    ids_T1 = torch.randint(width - 1, (num_rows, 1))
    uniform_T = cdf_of(x_TV, inverse_T).gather(1, ids_T1).squeeze(1)
    return x_TV, inverse_T, uniform_T.clamp(max=LAST)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_chosen_interval_holds_the_number(typed: Typed, width: int) -> None:
    """A block that is lost or counted twice; the end of a row that fills no vector; strided rows; a masked index."""
    x_TV, inverse_T, uniform_T = random_rows(64, width, typed.dtype)
    before_TV = x_TV.clone()
    ids_T = typed.kernels.draw(x_TV, inverse_T, uniform_T)
    assert ids_T.dtype == torch.int64 and torch.equal(x_TV, before_TV)
    ids_T1 = ids_T.unsqueeze(1)
    cdf_TV = cdf_of(x_TV, inverse_T)
    upper_T = cdf_TV.gather(1, ids_T1).squeeze(1)
    below_T = cdf_TV.gather(1, (ids_T1 - 1).clamp(min=0)).squeeze(1)
    lower_T = below_T.where(ids_T > 0, 0.0)
    assert (lower_T - 1e-5 <= uniform_T).all() and (uniform_T <= upper_T + 1e-5).all()
    assert (x_TV.gather(1, ids_T1) > -INF).all()


@pytest.mark.parametrize("inverse", [1.0, 0.25, 4.0])
def test_evenly_spaced_numbers_give_the_softmax(typed: Typed, inverse: float) -> None:
    """Weights to another temperature, or of another base: each index is drawn as often as its probability says."""
    num_draws, width = 4096, 700
    x_V = (torch.randn(width, generator=torch.Generator().manual_seed(1)) * 2).to(typed.dtype)
    inverse_T = torch.full((num_draws,), inverse)
    uniform_T = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    ids_T = typed.kernels.draw(x_V.expand(num_draws, -1), inverse_T, uniform_T)
    expected_V = num_draws * (x_V.double() * inverse).softmax(dim=-1)
    assert (ids_T.bincount(minlength=width) - expected_V).abs().max() < 1.05
    assert all(a <= b for a, b in pairwise(ids_T.tolist()))


def test_the_same_index_as_the_reference(level: NativeKernels) -> None:
    """Another choice than the definition's, but for numbers that rounding moves over a boundary."""
    for width in WIDTHS:
        x_TV, inverse_T, uniform_T = random_rows(200, width, torch.bfloat16)
        near_T = (cdf_of(x_TV, inverse_T) - uniform_T.unsqueeze(1)).abs().amin(dim=-1) < 1e-6
        native_T = level.draw(x_TV, inverse_T, uniform_T)
        same_T = native_T == ReferenceKernels().draw(x_TV, inverse_T, uniform_T)
        assert (same_T | near_T).all() and near_T.float().mean() < 0.1


@pytest.mark.parametrize("number", [0.0, LAST])
@pytest.mark.parametrize("width", [5, 40, 513, 5000])
def test_the_ends_of_the_range_are_not_masked(typed: Typed, width: int, number: float) -> None:
    """The number 0 takes the first index although it has no weight; one next to 1 runs out of the row."""
    first, last = width // 3, width - 1 - width // 3
    x_TV = torch.full((200, width), -INF)
    x_TV[:, first : last + 1] = torch.randn(200, last + 1 - first) * 5
    x_TV[:, first : last + 1 : 7] = -INF
    x_TV[:, [first, last]] = 1.0
    uniform_T = torch.full((200,), number, dtype=torch.float64)
    ids_T = typed.kernels.draw(x_TV.to(typed.dtype), torch.ones(200), uniform_T)
    assert ids_T.unique().tolist() == [last if number else first]


@pytest.mark.parametrize("tail", [-80.0, -100.0, -INF])
def test_weights_too_small_for_the_sum(typed: Typed, tail: float) -> None:
    """A sum that rounds to less than the number asks for, or an index whose weight is zero."""
    x_TV = torch.full((1, 3000), tail)
    x_TV[0, 1234] = 0.0
    for number in (0.5, LAST):
        uniform_T = torch.tensor([number], dtype=torch.float64)
        ids_T = typed.kernels.draw(x_TV.to(typed.dtype), torch.ones(1), uniform_T)
        assert ids_T.tolist() == [1234]


def test_threads_and_batch_mates_change_nothing(level: NativeKernels) -> None:
    """Sums by threads: a seeded request draws other tokens on another machine, or beside other requests."""
    x_TV, inverse_T, uniform_T = boundaries(40, 20_001, torch.bfloat16)
    torch.set_num_threads(1)
    expected_T = level.draw(x_TV, inverse_T, uniform_T)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for num_rows in (1, 2, 7, 40):
            parts = zip(*(t.split(num_rows) for t in (x_TV, inverse_T, uniform_T)), strict=True)
            found_T = torch.cat([level.draw(*part) for part in parts])
            assert torch.equal(found_T, expected_T), (num_threads, num_rows)


def test_masked_values_behind_a_row_change_nothing(typed: Typed) -> None:
    """A draw that depends on how many candidates of a row were looked at."""
    for width in (20, 256, 700):
        x_TV, inverse_T, uniform_T = boundaries(100, width, typed.dtype)
        expected_T = typed.kernels.draw(x_TV, inverse_T, uniform_T)
        for more in (1, 16, 500, 9000):
            wide_TV = torch.nn.functional.pad(x_TV, (0, more), value=-INF)
            assert torch.equal(typed.kernels.draw(wide_TV, inverse_T, uniform_T), expected_T)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("place", [0, 17, 600, 9001, 9009])
def test_a_broken_row_gives_no_index(typed: Typed, bad: float, place: int) -> None:
    """Comparisons with NaN are false: the first or last index of a broken row would look like a token."""
    x_TV = torch.randn(4, 9010).to(typed.dtype)
    x_TV[1, place] = bad
    x_TV[2] = -INF
    uniform_T = torch.full((4,), 0.5, dtype=torch.float64)
    ids_T = typed.kernels.draw(x_TV, torch.ones(4), uniform_T)
    assert (ids_T >= 0).tolist() == [True, False, False, True] and ids_T.min() == -1


def test_extreme_logits_and_temperatures(typed: Typed) -> None:
    """Differences that overflow; a temperature so high that all are alike, so low that only the best is left."""
    x_TV = torch.tensor([[-3e38, 3e38, -INF, 2.9e38], [1.0, 1.5, -INF, 1.25]]).repeat(2, 1)
    inverse_T = torch.tensor([1e5, 1e5, 1e-30, 1e-30])
    for number, expected in ((0.0, [1, 1, 0, 0]), (LAST, [1, 1, 3, 3])):
        uniform_T = torch.full((4,), number, dtype=torch.float64)
        found = typed.kernels.draw(x_TV.to(typed.dtype), inverse_T, uniform_T).tolist()
        assert found[1::2] == expected[1::2]
        if typed.dtype != torch.float16:  # there 3e38 is infinite
            assert found[0] == found[2] == 1


def test_no_rows(typed: Typed) -> None:
    """A step in which nothing is due."""
    no_rows_TV = torch.zeros(0, 8).to(typed.dtype)
    ids_T = typed.kernels.draw(no_rows_TV, torch.zeros(0), torch.zeros(0, dtype=torch.float64))
    assert ids_T.shape == (0,) and ids_T.dtype == torch.int64


X, ONES, HALF = torch.zeros(2, 8), torch.ones(2), torch.full((2,), 0.5, dtype=torch.float64)
REFUSED: dict[str, tuple[tuple[Tensor, Tensor, Tensor], str]] = {
    "no features": ((X[:, :0], ONES, HALF), "at least one feature"),
    "columns": ((torch.zeros(8, 2).t(), ONES, HALF), "x must be"),
    "double temperatures": ((X, HALF, HALF), "inverse_temperature must be Float"),
    "float numbers": ((X, ONES, ONES), "uniform must be Double"),
    "too many temperatures": ((X, torch.ones(3), HALF), "inverse_temperature must have shape"),
    "too few numbers": ((X, ONES, HALF[:1]), "uniform must have shape"),
    "strided numbers": ((X, ONES, HALF.repeat(2)[::2]), "uniform must be contiguous"),
    "no temperature": ((X, ONES * 0, HALF), "finite and above 0, got 0 in row 0"),
    "infinite temperature": ((X, torch.tensor([1.0, INF]), HALF), "got inf in row 1"),
    "a number of 1": ((X, ONES, HALF * 2), r"uniform must be in \[0, 1\), got 1 in row 0"),
    "a negative number": ((X, ONES, -HALF), "got -0.5 in row 0"),
    "no number": ((X, ONES, HALF * NAN), "got nan in row 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(native: NativeKernels, name: str) -> None:
    """A read outside of a tensor, or a number beyond the row's last index."""
    arguments, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        native.draw(*arguments)
