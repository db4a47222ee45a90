"""The interval's own part; what repeats is tests/engine/test_asking.py."""

import pytest

from tests.routers.wrapping import Asked, ids, see
from tokenrouter.routers import BatchedRouter, Budget, IntervalRouter


@pytest.mark.parametrize("every", [0, 9, -1])
def test_the_interval_is_bounded(every: int) -> None:
    """Guards against a division by zero, and against decisions older than they may be."""
    with pytest.raises(ValueError, match=rf"every={every} is outside 1 .* to 8"):
        IntervalRouter(every=every)


def test_a_budget_is_set_on_the_tokens_that_decide() -> None:
    """Guards against a share that holds for all tokens and not for those that are asked about."""
    inner = Asked(budget=Budget(high_frac=0.25))
    router = IntervalRouter(inner, every=5)
    inputs = see(router, ids(2000), 1000)
    router.calibrate([inputs])
    decides_T = inputs.positions_T % 5 == 0
    share = (router.route(inputs).route_T[decides_T] == 0).float().mean()
    assert float(share) == pytest.approx(0.25, abs=0.01)


def test_only_tokens_that_decide_are_prepared() -> None:
    """Guards against work for tokens that nobody asks about."""
    router = IntervalRouter(BatchedRouter(Asked(), batch=64), every=4)
    inputs = see(router, ids(64))
    assert router.look_ahead == 64
    router.prepare(inputs)
    router.inner.route(see(router, [1]))
    assert router.inner.inner.calls == [17]
