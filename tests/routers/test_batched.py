"""Prompts decided ahead: fewer calls, the same answers."""

import pytest

from tests.routers.wrapping import Asked, ids, same, see
from tokenrouter.features.base import Dependency
from tokenrouter.routers import BatchedRouter, RuleRouter
from tokenrouter.routers.wrapper import select


def test_what_was_prepared_is_not_asked_again() -> None:
    """Guards against a call per chunk, and against answers of other tokens."""
    inner = Asked()
    router = BatchedRouter(inner, batch=64)
    inputs = see(router, ids(64))
    parts = [select(inputs, chunk) for chunk in inputs.positions_T.split(16)]
    expected = [RuleRouter().route(part) for part in parts]
    for part in parts[1:]:
        router.prepare(part)
    assert all(same(router.route(p), e) for p, e in zip(parts, expected, strict=True))
    assert inner.calls == [64]


def test_several_requests_are_one_call() -> None:
    """Guards against tokens of one request answered as another's."""
    inner = Asked()
    router = BatchedRouter(inner, batch=8)
    one, two = see(router, ids(30, 1)), see(router, ids(30, 2))
    router.prepare(two)
    assert same(router.route(one), RuleRouter().route(one))
    assert same(router.route(two), RuleRouter().route(two))
    assert inner.calls == [60]


def test_what_was_lost_is_asked_again() -> None:
    """Guards against a wrong answer where the store was too small for what was prepared."""
    router = BatchedRouter(Asked(), batch=8, capacity=8)
    inputs = see(router, ids(500))
    router.prepare(inputs)
    first = select(inputs, inputs.positions_T[:5])
    assert same(router.route(first), RuleRouter().route(first))
    assert same(router.route(inputs), RuleRouter().route(inputs))
    assert len(router.inner.calls) == 2


class Historic(RuleRouter):
    @property
    def depends_on(self) -> frozenset[Dependency]:
        return super().depends_on | {"history"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BatchedRouter(Historic()), "depend on history"),
        (lambda: BatchedRouter(batch=1), "batch=1 must be at least 2"),
        (lambda: BatchedRouter(batch=64, capacity=32), "capacity=32 must be at least batch=64"),
    ],
)
def test_refusals(make: object, message: str) -> None:
    """Guards against decisions taken before what they depend on is known."""
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
