"""The random router and the hashed draws."""

import numpy as np
import pytest
import torch

from tokenrouter.features import FeatureExtractor, TokenTypeTable, sequence_batch
from tokenrouter.features.draws import DRAW_LEVELS, draw_levels
from tokenrouter.routers import HIGH, RandomRouter
from tokenrouter.types import RouteInput

NUM_TOKENS = 100_000


@pytest.fixture(scope="module")
def inputs() -> RouteInput:
    """One long sequence of few distinct ids, as skewed as text."""
    ids = np.random.default_rng(0).zipf(1.3, NUM_TOKENS).clip(max=5000).tolist()
    extractor = FeatureExtractor((), TokenTypeTable.from_texts([" a"] * 5001))
    return extractor.extract(sequence_batch(ids))


def is_high(inputs: RouteInput, high_frac: float, seed: int = 0) -> torch.Tensor:
    return RandomRouter(high_frac=high_frac, seed=seed).route(inputs).route_T == HIGH


@pytest.mark.parametrize("high_frac", [0.01, 0.05, 0.1, 0.2, 0.5, 0.9])
def test_share_converges(inputs: RouteInput, high_frac: float) -> None:
    """Guards against a biased draw: the share is within four standard errors."""
    share = is_high(inputs, high_frac).float().mean().item()
    error = (high_frac * (1 - high_frac) / NUM_TOKENS) ** 0.5
    assert abs(share - high_frac) < 4 * error


def test_no_and_all(inputs: RouteInput) -> None:
    """Guards the ends: a draw of exactly 0 or 1 must not slip through."""
    assert not is_high(inputs, 0.0).any()
    assert is_high(inputs, 1.0).all()


def test_larger_shares_contain_smaller_ones(inputs: RouteInput) -> None:
    """Guards against a sweep over shares that compares unrelated sets of tokens."""
    few_T, many_T = is_high(inputs, 0.1), is_high(inputs, 0.2)
    assert (many_T | ~few_T).all()


def test_seeds_are_independent(inputs: RouteInput) -> None:
    """Guards against a seed that shifts the draws instead of renewing them."""
    level_ST = torch.stack([draw_levels(inputs.prefix_hash_T, seed) for seed in (0, 1, 2, -1)])
    assert level_ST.min() >= 0 and level_ST.max() < DRAW_LEVELS
    correlation_SS = torch.corrcoef(level_ST.double())
    assert (correlation_SS - torch.eye(4)).abs().max() < 0.02
    both = (is_high(inputs, 0.2, seed=0) & is_high(inputs, 0.2, seed=1)).float().mean().item()
    assert abs(both - 0.04) < 0.004


def test_neighbours_are_independent(inputs: RouteInput) -> None:
    """Guards against high tokens in clusters."""
    high_T = is_high(inputs, 0.2)
    pairs = (high_T[1:] & high_T[:-1]).float().mean().item()
    assert abs(pairs - 0.04) < 0.004


@pytest.mark.parametrize("high_frac", [-0.1, 1.5, float("nan")])
def test_impossible_shares_are_refused(high_frac: float) -> None:
    """Guards against 10 meant as 10 %."""
    with pytest.raises(ValueError, match="is outside 0 to 1"):
        RandomRouter(high_frac=high_frac)


def test_draws_depend_on_tokens_alone() -> None:
    """Guards prefix sharing: hashed draws repeat for a shared prefix."""
    assert RandomRouter().depends_on == {"tokens"}
