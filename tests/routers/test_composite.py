"""One router per dimension, joined into pairs."""

import pytest
import torch

from tests.routers.wrapping import ids, same, see
from tokenrouter.routers import (
    AllLowRouter,
    BatchedRouter,
    Budget,
    CompositeRouter,
    IntervalRouter,
    LayerwiseRouter,
    RandomRouter,
    RequestLevelRouter,
    RuleRouter,
)
from tokenrouter.types import Phase

CLASSES = {"high": "protect", "low": "normal"}


def both(**classes: str) -> CompositeRouter:
    return CompositeRouter(
        RuleRouter(repeats=2, repeats_go="high"),
        RuleRouter(first_positions=3, high_types=["number"]),
        {**CLASSES, **classes},  # type: ignore[dict-item]
    )


def test_a_route_is_the_pair_of_both_answers() -> None:
    """Guards against an index that means another pair than its name says, and lost reasons."""
    router = both()
    inputs = see(router, ids(200), 120)
    table, answer = router.routes(30), router.route(inputs)
    assert table.names == ("high+protect", "high+normal", "low+protect", "low+normal")
    parts = []
    for part in (router.precision, router.retention):
        decision = part.route(see(part, ids(200), 120))
        names = [part.routes(30).names[r] for r in decision.route_T.tolist()]
        parts.append((names, [decision.reasons[r] for r in decision.reason_T.tolist()], decision))
    (precision, why, scored), (retention, why_kept, _) = parts
    for t, route in enumerate(answer.route_T.tolist()):
        assert table.names[route] == f"{precision[t]}+{CLASSES[retention[t]]}"
        assert table.routes[route].retention == CLASSES[retention[t]]
        assert table.routes[route].executors == {precision[t]}
        assert answer.reasons[int(answer.reason_T[t])] == f"{why[t]}; {why_kept[t]}"
    assert torch.equal(answer.score_T, scored.score_T)
    assert len(answer.route_T.unique()) == 4, "the case must have every pair"


def test_routes_of_one_class_are_one_route() -> None:
    """Guards against two routes of one name, which a RouteTable refuses."""
    router = both(low="protect")
    assert router.routes(30).names == ("high+protect", "low+protect")
    assert router.route(see(router, ids(90))).route_T.max() == 1


def test_either_part_may_be_left_out() -> None:
    """Guards against a composite that needs a router for what nobody chose."""
    inner = RuleRouter()
    precision = CompositeRouter(precision=inner)
    assert precision.routes(30).names == ("high+normal", "low+normal")
    inputs = see(inner, ids(60))
    assert torch.equal(precision.route(inputs).route_T, inner.route(inputs).route_T)
    retention = CompositeRouter(retention=inner)
    assert retention.routes(30).names == ("high+protect", "high+normal")
    answer = retention.route(inputs)
    assert torch.equal(answer.route_T, inner.route(inputs).route_T)
    assert torch.equal(answer.score_T, inner.route(inputs).score_T), "the part that was chosen"
    fixed = CompositeRouter(LayerwiseRouter(), AllLowRouter(), {"low": "drop_first"})
    assert fixed.routes(30).names == ("layerwise+normal", "layerwise+drop_first")
    assert fixed.only_route == 1
    assert set(fixed.route(see(fixed, ids(9))).route_T.tolist()) == {1}


def test_each_part_has_its_own_budget_and_version() -> None:
    """Guards against thresholds of one part used by the other, and decisions reused across budgets."""
    made = [
        CompositeRouter(
            RuleRouter(budget=Budget(high_frac=share)), RuleRouter(budget=Budget(high_frac=0.6))
        )
        for share in (0.2, 0.3)
    ]
    assert made[0].version != made[1].version
    router = made[0]
    inputs = see(router, ids(2000), 1000)
    assert router.needs_calibration
    before = router.version
    router.calibrate([inputs])
    assert not router.needs_calibration and router.version != before
    route_T = router.route(inputs).route_T
    assert float((route_T < 2).float().mean()) == pytest.approx(0.2, abs=0.01)
    assert float((route_T % 2 == 0).float().mean()) == pytest.approx(0.6, abs=0.01)


class DecodeOnly(RandomRouter):
    phases = frozenset({Phase.DECODE})


def test_a_part_is_asked_in_its_own_phases() -> None:
    """Guards against a part asked about tokens that it does not decide."""
    part = DecodeOnly(0.5)
    router = CompositeRouter(RuleRouter(), part, {"high": "normal", "low": "drop_first"})
    inputs = see(router, ids(80), 40)
    answer = router.route(inputs)
    kept_T = answer.route_T % 2
    assert not kept_T[:40].any(), "route 0 of the part: high, normal"
    assert torch.equal(kept_T[40:], part.route(inputs).route_T[40:])
    assert kept_T[40:].any()
    reason = answer.reasons[int(answer.reason_T[0])]
    assert reason.endswith("; phase that it does not decide")
    assert not answer.score_T.isnan().any()


def test_parts_are_prepared_for_what_they_look_at() -> None:
    """Guards against a part that gets the other's features, whose kept answers it would never find."""
    inner = RuleRouter(repeats=2)
    router = CompositeRouter(BatchedRouter(inner, batch=32), RandomRouter(0.5))
    inputs = see(router, ids(50))
    router.prepare(inputs)
    assert router.look_ahead == 32
    plain = CompositeRouter(inner, RandomRouter(0.5))
    assert same(router.route(inputs), plain.route(see(plain, ids(50))))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CompositeRouter(), "has no part"),
        (lambda: CompositeRouter(RequestLevelRouter()), "decides per request"),
        (lambda: CompositeRouter(RuleRouter(), IntervalRouter()), "put interval outermost"),
        (
            lambda: both(medium="protect"),
            "classes names medium, and 'rule' has the routes high, low",
        ),
        (lambda: both(low="forget"), r"classes\.low='forget' is no retention class; choose one of"),
    ],
)
def test_refusals(make: object, message: str) -> None:
    """Guards against an IndexError in place of a sentence."""
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
