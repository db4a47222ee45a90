"""Guards the draws of seeded requests: each as good as a random number, beside those of any other seed and place."""

import numpy as np
import pytest
from numpy.typing import NDArray

from tokenrouter.features.draws import seed_key, uniform_draws

NUM = 50_000
CELLS = 16


def of_seeds(number: int, first: int = 0) -> NDArray[np.float64]:
    """Draw ``number`` of NUM neighbouring seeds."""
    keys = [seed_key(seed) % 2**64 for seed in range(first, first + NUM)]
    return uniform_draws(np.array(keys, np.uint64), np.full(NUM, number))


def of_places(seed: int) -> NDArray[np.float64]:
    """The first NUM draws of a seed."""
    return uniform_draws(np.full(NUM, seed_key(seed) % 2**64, np.uint64), np.arange(NUM))


def surprise(a_N: NDArray[np.float64], b_N: NDArray[np.float64]) -> float:
    """Chi-square of pairs over CELLS x CELLS equal cells, in standard deviations from what chance gives."""
    num_cells = CELLS**2
    cell_N = (a_N * CELLS).astype(int) * CELLS + (b_N * CELLS).astype(int)
    expected = len(cell_N) / num_cells
    found = ((np.bincount(cell_N, minlength=num_cells) - expected) ** 2 / expected).sum()
    return float((found - (num_cells - 1)) / np.sqrt(2 * (num_cells - 1)))


def test_the_stream_is_that_of_the_reference() -> None:
    """The first numbers of splitmix64 from state 0, as its authors' code gives them."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    got_N = uniform_draws(np.zeros(3, np.uint64), np.arange(3))
    assert got_N.tolist() == [(x >> 11) * 2.0**-53 for x in expected]


@pytest.mark.parametrize("number", [0, 1, 4095, 2**40])
def test_neighbouring_seeds_are_independent(number: int) -> None:
    """Seeds s and s + 1, which the completions of one prompt have, that draw alike at the same or the next place."""
    here_N, next_N = of_seeds(number), of_seeds(number + 1)
    for a_N, b_N in ((here_N[:-1], here_N[1:]), (here_N, next_N), (here_N[1:], next_N[:-1])):
        assert abs(surprise(a_N, b_N)) < 4


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1])
def test_the_places_of_a_stream_are_independent(seed: int) -> None:
    """A stream that remembers its last numbers, or leaves out a part of the range."""
    draws_N = of_places(seed)
    for lag in (1, 2, 64):
        assert abs(surprise(draws_N[:-lag], draws_N[lag:])) < 4
    assert 0 <= draws_N.min() < 1e-3 and 1 - 1e-3 < draws_N.max() < 1
    assert len(np.unique(draws_N)) == NUM
