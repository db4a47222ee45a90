"""The rule router: which rule decides, what the score adds up, what a budget lets through."""

from typing import Any

import pytest
import torch

from tokenrouter.features import TokenTypeTable, sequence_batch
from tokenrouter.routers import HIGH, Budget, RuleRouter, RuleWeights
from tokenrouter.types import Phase, RouteInput

# ids:                                0     1     2      3         4       5      6
TABLE = TokenTypeTable.from_texts([None, "\n", " the", " river", " Rome", "The", "7"])
OFF: dict[str, Any] = {"first_positions": 0, "prompt_end": 0, "high_types": ()}


def see(router: RuleRouter, ids: list[int], prompt_len: int | None = None) -> RouteInput:
    batch = sequence_batch(ids, prompt_len=prompt_len)
    return router.extractor(TABLE).extract(batch)


def high(router: RuleRouter, ids: list[int], prompt_len: int | None = None) -> list[int]:
    """Positions that go high."""
    route_T = router.route(see(router, ids, prompt_len)).route_T
    return (route_T == HIGH).nonzero().flatten().tolist()


def reasons(router: RuleRouter, ids: list[int], prompt_len: int | None = None) -> list[str]:
    decision = router.route(see(router, ids, prompt_len))
    return [decision.reasons[i] for i in decision.reason_T.tolist()]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"first_positions": 2}, [0, 1]),
        ({"prompt_end": 2}, [3, 4]),
        ({"high_types": ["newline", "special"]}, [2, 5, 7]),
        ({"repeats": 2, "repeats_go": "high"}, [4, 6]),
        ({"repeats": 1, "repeats_go": "low", "high_types": ["newline"]}, [2]),
        ({"repeats": 1, "prompt_end": 1, "high_types": ["newline"]}, [2, 4]),
        ({"first_positions": 1, "prompt_end": 1, "high_types": ["function_word"]}, [0, 4]),
    ],
    ids=lambda value: " ".join(map(str, value)) or "none",
)
def test_each_rule_alone(options: dict[str, Any], expected: list[int]) -> None:
    """Guards each rule's edge: off by one, or the prompt's end sought among decode tokens."""
    ids = [3, 3, 1, 4, 3, 1, 3, 0]
    assert high(RuleRouter(**{**OFF, **options}), ids, prompt_len=5) == expected


def test_reasons_name_the_first_rule_that_applies() -> None:
    """Guards the decision log: a token in two rules must not be blamed on the later one."""
    router = RuleRouter(first_positions=1, prompt_end=1, high_types=["newline"], repeats=1)
    assert reasons(router, [1, 3, 1, 3, 4, 1], prompt_len=4) == [
        "first positions",
        "no rule applies",
        "repeats, goes low",
        "prompt end",
        "no rule applies",
        "repeats, goes low",
    ]
    router = RuleRouter(**{**OFF, "high_types": ["number"], "repeats": 1, "repeats_go": "high"})
    assert reasons(router, [6, 6]) == ["type number", "repeats, goes high"]


def test_score_is_the_weighted_sum() -> None:
    """Guards against a weight that is dropped or applied to another sign."""
    weights = RuleWeights(
        first_positions=100,
        position=10,
        position_scale=1,
        prompt_end=1000,
        line_start=0.5,
        repeats=3,
        types={"newline": 7, "entity": 20},
    )
    router = RuleRouter(first_positions=2, prompt_end=1, repeats=1, weights=weights)
    ids = [1, 5, 3, 1, 4]
    score_T = router.score(see(router, ids, prompt_len=4))
    expected = [107 + 10, 100.5 + 5, 10 / 3, 1010 + 2.5, 20 + 2]
    excess_T = score_T.double() - torch.tensor(expected, dtype=torch.float64)
    assert ((excess_T > -1e-4) & (excess_T < 1.1e-3)).all(), excess_T
    assert torch.equal(score_T, router.route(see(router, ids, prompt_len=4)).score_T)


def test_position_score_goes_on_beyond_its_table() -> None:
    """Guards against an index error, or a token 0's score, at positions past the table."""
    router = RuleRouter(weights=RuleWeights(types={}))
    score_T = router.score(see(router, [3] * 5000))
    assert score_T.isfinite().all()
    assert score_T[4990] < score_T[100] < score_T[16] < score_T[15] < score_T[0]


def test_ties_break_by_prefix_and_seed() -> None:
    """Guards against a threshold among equal scores, which would let all of them pass or none."""
    ids = [3] * 1000
    flat = RuleWeights(first_positions=0, position=0, prompt_end=0, types={})
    scores = []
    for seed in (0, 1):
        router = RuleRouter(**OFF, weights=flat, budget=Budget(high_frac=0.25, seed=seed))
        inputs = see(router, ids)
        router.calibrate([inputs])
        score_T = router.score(inputs)
        assert 0 <= score_T.min() and score_T.max() < 1e-3
        assert len(score_T.unique()) > 900
        assert len(high(router, ids)) == 250
        scores.append(score_T)
    assert not torch.equal(*scores)


def test_budget_reasons() -> None:
    """Guards the decision log under a budget: every high token has a sign, every low one none."""
    router = RuleRouter(first_positions=2, prompt_end=0, budget=Budget(high_frac=0.5))
    ids = [3, 3, 3, 1, 3, 2]
    router.calibrate([see(router, ids)])
    names = reasons(router, ids)
    assert names[:2] == ["first positions", "first positions"]
    assert names[5] == "type function_word"
    assert names.count("under the budget's threshold") == 3


def test_a_budget_needs_calibration() -> None:
    """Guards against a budget that is silently not applied, or applied to one phase only."""
    router = RuleRouter(budget=Budget(high_frac=0.5))
    assert router.needs_calibration and router.thresholds == {}
    prompt, both = see(router, [3, 1, 2, 3]), see(router, [3, 1, 2, 3], prompt_len=1)
    with pytest.raises(ValueError, match=r"no threshold for prefill tokens: call router.calibrate"):
        router.route(prompt)
    with pytest.raises(ValueError, match="no tokens"):
        router.calibrate([])
    router.calibrate([prompt])
    assert not router.needs_calibration and set(router.thresholds) == {Phase.PREFILL}
    assert (router.route(prompt).route_T == HIGH).sum() == 2
    with pytest.raises(ValueError, match="no threshold for decode tokens"):
        router.route(both)


def test_without_a_budget_calibration_does_nothing() -> None:
    """Guards against thresholds that change the version of a router that ignores them."""
    router = RuleRouter()
    version = router.version
    router.calibrate([see(router, [3, 1, 2])])
    assert not router.needs_calibration and router.version == version


def test_only_needed_features_are_asked_for() -> None:
    """Guards the cost per step: features of rules that are off."""
    assert RuleRouter().features == ("token_type", "distance_to_prompt_end")
    assert RuleRouter(prompt_end=0).features == ("token_type",)
    router = RuleRouter(repeats=2, weights=RuleWeights(line_start=1.0))
    assert set(router.features) >= {"repeats", "line_start"}
    assert router.depends_on == {"tokens", "prompt_length"}
    assert RuleRouter(prompt_end=0).depends_on == {"tokens"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"high_types": ["numbers"]}, "'numbers'; token types: special"),
        ({"first_positions": -1}, "first_positions=-1 is outside 0"),
        ({"prompt_end": 5000}, r"prompt_end=5000 is outside 0 \(off\) to 4095"),
        ({"repeats_go": "up"}, "repeats_go='up' is neither"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    """Guards against a rule that silently matches nothing."""
    with pytest.raises(ValueError, match=message):
        RuleRouter(**options)


def test_bad_weights_are_refused() -> None:
    """Guards against a misspelt type, and a division by zero at position 0."""
    with pytest.raises(ValueError, match="'digit'; token types"):
        RuleWeights(types={"digit": 1.0})
    with pytest.raises(ValueError, match="position_scale=0"):
        RuleWeights(position_scale=0)
