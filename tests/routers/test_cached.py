"""Answers kept by pattern: a function of the key, whatever was asked before."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.routers.wrapping import TABLE, Asked, ids, same, see
from tokenrouter.features import FeatureExtractor, sequence_batch
from tokenrouter.features.base import Dependency
from tokenrouter.routers import (
    Budget,
    CachedRouter,
    IntervalRouter,
    RandomRouter,
    RequestLevelRouter,
    RuleRouter,
)
from tokenrouter.routers.patterns import Rounding, key_of, rounded
from tokenrouter.types import RouteInput


def budgeted() -> RuleRouter:
    return RuleRouter(budget=Budget(high_frac=0.3))


def test_exact_keys_change_nothing() -> None:
    """Guards against an answer that differs from the inner router's own."""
    inner = RuleRouter(repeats=2)
    router = CachedRouter(inner, key="exact", capacity=64)
    for seed in (0, 1, 0, 2):
        inputs = see(router, ids(90, seed), 50)
        assert same(router.route(inputs), inner.route(inputs))
    assert router.cache_counts.hits > 0


@pytest.mark.parametrize("capacity", [8, 65_536])
def test_the_answer_does_not_depend_on_what_came_first(capacity: int) -> None:
    """Guards against the answer of whichever token had the pattern first."""
    first, second = CachedRouter(capacity=capacity), CachedRouter(capacity=capacity)
    asked = [see(first, ids(200, seed), 120) for seed in range(6)]
    there = [first.route(inputs) for inputs in asked]
    back = [second.route(inputs) for inputs in reversed(asked)]
    assert all(same(a, b) for a, b in zip(there, reversed(back), strict=True))


def test_equal_patterns_are_one_question() -> None:
    """Guards against keys that hold what the inner router does not see, such as ids for the rules."""
    router = CachedRouter(Asked(prompt_end=0))
    inputs = see(router, ids(1500, 3))
    router.route(inputs)
    pattern = rounded(inputs, router.sees, Rounding(16, 2))
    num_patterns = len({tuple(row) for row in key_of(pattern).tolist()})
    assert router.inner.calls == [num_patterns] and num_patterns < 300
    router.route(see(router, ids(1500, 4)))
    assert router.cache_counts.lookups == 3000
    assert router.cache_counts.hits == 3000 - sum(router.inner.calls) > 2600
    assert not router.inner.inputs[0].ids_T.any(), "the rules do not look at ids"


def test_what_the_inner_router_sees_is_in_the_key() -> None:
    """Guards against one answer for two ids, when the inner router looks at them."""

    class ById(Asked):
        sees = frozenset({"ids"})

    router = CachedRouter(ById(prompt_end=0, high_types=[]))
    router.route(see(router, ids(500)))
    [inputs] = router.inner.inputs
    assert len(inputs.ids_T.unique()) == len(set(ids(500)))


def test_an_id_is_no_quantity_to_round() -> None:
    """Guards against the token before being taken for another one, whose id is a step's edge."""

    extractor = FeatureExtractor(("previous_id", "position"), TABLE)
    inputs = extractor.extract(sequence_batch(ids(500)))
    pattern = rounded(inputs, frozenset(), Rounding(16, 2))
    assert torch.equal(pattern.values_TF[:, 0], inputs.values_TF[:, 0])
    assert len(pattern.values_TF[:, 1].unique()) < 40


def test_a_budget_holds_on_patterns() -> None:
    """Guards against thresholds for tokens that the inner router never sees, and kept old answers."""
    router = CachedRouter(budgeted())
    inputs = see(router, ids(2000, 5), 1000)
    router.calibrate([inputs])
    share = (router.route(inputs).route_T == 0).float().mean()
    assert abs(float(share) - 0.3) < 0.05
    before = router.route(inputs)
    router.inner.budget = Budget(high_frac=0.9)
    router.calibrate([inputs])
    assert (router.route(inputs).route_T == 0).sum() > (before.route_T == 0).sum()


@given(
    number=st.integers(-3_000_000, 3_000_000),
    exact_below=st.integers(1, 40),
    steps=st.integers(1, 6),
)
def test_rounding(number: int, exact_below: int, steps: int) -> None:
    """Guards against a rounding that moves small numbers, changes signs or goes away from 0."""
    rounding = Rounding(exact_below, steps)
    for x_T in (torch.tensor([number]), torch.tensor([float(number)])):
        [rounded_T] = rounding(x_T)
        assert rounded_T.dtype == x_T.dtype
        size, original = abs(float(rounded_T)), abs(float(x_T[0]))
        assert size == original if original < exact_below else original / 2 - 1 < size <= original
        assert torch.equal(rounding(rounded_T[None])[0], rounded_T), "a step stays where it is"
        assert float(rounded_T) * number >= 0


def test_what_is_not_finite_stays() -> None:
    """Guards against a NaN that becomes a number, which no learned router could refuse any more."""
    x_T = torch.tensor([float("nan"), float("inf"), -float("inf"), 2.5, 0.0])
    assert torch.equal(Rounding(16, 2)(x_T).nan_to_num(7.0), x_T.nan_to_num(7.0))


class Loaded(RuleRouter):
    @property
    def depends_on(self) -> frozenset[Dependency]:
        return super().depends_on | {"load"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CachedRouter(Loaded()), "depend on load, which is never the same again"),
        (lambda: CachedRouter(RandomRouter()), "draws by a token's whole prefix.*key=exact"),
        (lambda: CachedRouter(RequestLevelRouter()), "decides per request"),
        (lambda: CachedRouter(IntervalRouter()), "put interval outermost"),
        (lambda: CachedRouter(key="prefix"), "key='prefix' is neither"),  # type: ignore[arg-type]
        (lambda: CachedRouter(exact_below=0), "exact_below=0 must be at least 1"),
        (lambda: CachedRouter(steps_per_octave=0), "steps_per_octave=0 must be"),
        (lambda: CachedRouter(capacity=3), "capacity=3 must be at least 8"),
    ],
)
def test_what_cannot_be_kept_is_refused(make: object, message: str) -> None:
    """Guards against answers of another moment, and against options out of range."""
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_forgetting_changes_no_answer() -> None:
    """Guards against a pass that differs from the one before because its cache was warm."""
    router = CachedRouter(Asked())
    inputs: RouteInput = see(router, ids(300))
    before = router.route(inputs)
    router.forget()
    assert same(router.route(inputs), before)
    assert len(router.inner.calls) == 2
