"""One path per request, with the token router's budget."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenrouter.features import FeatureExtractor, TokenTypeTable, sequence_batch
from tokenrouter.routers import (
    HIGH,
    Budget,
    LayerwiseRouter,
    RandomRouter,
    RequestLevelRouter,
    Router,
    RuleRouter,
)
from tokenrouter.types import Phase, RouteInput, RouteTable

TABLE = TokenTypeTable.from_texts(["\n", " river"])


def router(high_frac: float | None) -> RequestLevelRouter:
    """Newlines are needy, nothing else."""
    inner = RuleRouter(first_positions=0, prompt_end=0, high_types=["newline"])
    return RequestLevelRouter(inner=inner, high_frac=high_frac)


def request(ids: Sequence[int], prompt_len: int | None = None, row: int = 0) -> RouteInput:
    batch = sequence_batch(ids, prompt_len=prompt_len, row=row)
    return FeatureExtractor(("token_type",), TABLE).extract(batch)


def is_high(level: RequestLevelRouter, inputs: RouteInput) -> bool:
    route_T = level.route(inputs).route_T
    assert len(route_T.unique()) == 1
    return int(route_T[0]) == HIGH


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 8).map(lambda n: n / 8), st.integers(1, 1000)),
        min_size=1,
        max_size=12,
    ),
    target=st.floats(0, 1),
)
def test_threshold_is_the_nearest_possible(
    requests: list[tuple[float, int]], target: float
) -> None:
    """Guards the budget: no other threshold on the share comes nearer, weighted by tokens."""
    shares, weights = zip(*requests, strict=True)
    level = router(target)
    level.calibrate_requests(shares, weights)
    assert level.threshold is not None

    def high_frac(threshold: float) -> float:
        high = sum(w for share, w in requests if share >= threshold)
        return high / sum(weights)

    possible = [high_frac(threshold) for threshold in [*shares, 2.0]]
    best = min(abs(value - target) for value in possible)
    assert abs(high_frac(level.threshold) - target) == pytest.approx(best, abs=1e-12)


def test_calibrates_on_prompts_and_weighs_whole_requests() -> None:
    """Guards against shares that see generated tokens, which do not exist when it decides."""
    needy = request([0, 1, 1, 1, 1, 1, 1, 1], prompt_len=2)  # share 1/2, 8 tokens
    calm = request([1, 1, 1, 1, 0, 0], prompt_len=4)  # share 0, 6 tokens, needy output
    level = router(0.5)
    assert level.needs_calibration
    level.calibrate([needy, calm])
    assert not level.needs_calibration and level.threshold == 0.25
    assert is_high(level, request([0, 1])) and not is_high(level, request([1, 1, 1, 1]))
    level.set_target(1.0)
    level.calibrate([needy, calm])
    assert is_high(level, calm)
    level.set_target(0.0)
    level.calibrate([needy, calm])
    assert not is_high(level, request([0, 0, 0])), "more needy than all that it saw"


def test_rows_of_one_input_are_told_apart() -> None:
    """Guards against a share averaged over the requests of a batch."""
    one, other = request([0, 1, 1, 1], row=8), request([0, 0, 1, 1], row=3)
    both = RouteInput(
        names=one.names,
        **{
            name: torch.cat([getattr(one, name), getattr(other, name)])
            for name in one.__slots__
            if name != "names"
        },
    )
    level = router(0.5)
    level.calibrate([both])
    assert level.prompt_shares(both) == {3: 0.5, 8: 0.25}
    decision = level.route(both)
    assert (decision.route_T == HIGH).tolist() == [False] * 4 + [True] * 4
    assert decision.score_T.tolist() == [0.25] * 4 + [0.5] * 4


def test_a_missing_target_or_calibration_is_named() -> None:
    """Guards against a baseline that runs all high or all low because nobody set its budget."""
    level = router(None)
    for call in (lambda: level.route(request([0])), lambda: level.calibrate([request([0])])):
        with pytest.raises(ValueError, match="has no high_frac: set it"):
            call()
    level.set_target(0.5)
    with pytest.raises(ValueError, match=r"call router\.calibrate\(inputs\) with whole requests"):
        level.route(request([0]))
    with pytest.raises(ValueError, match="0 shares and 0 weights"):
        level.calibrate_requests([], [])
    with pytest.raises(ValueError, match="2 shares and 1 weights"):
        level.calibrate_requests([0.1, 0.2], [3])
    with pytest.raises(ValueError, match="outside 0 to 1"):
        level.set_target(20)


def test_a_new_target_needs_a_new_threshold() -> None:
    """Guards against a sweep over budgets that keeps the first one's threshold."""
    level = router(0.5)
    level.calibrate([request([0, 1]), request([1, 1])])
    version = level.version
    level.set_target(0.1)
    assert level.needs_calibration and level.version != version


def test_wraps_any_token_router_but_not_itself() -> None:
    """Guards the features and dependencies that the inner router needs."""
    level = RequestLevelRouter(inner=RandomRouter(0.3), high_frac=0.5)
    assert level.features == () and level.depends_on == {"tokens", "prompt"}
    with pytest.raises(ValueError, match="'request_level' does not decide per token"):
        RequestLevelRouter(inner=level)


class LowFirst(RandomRouter):
    """The usual two routes in another order."""

    def routes(self, num_layers: int) -> RouteTable:
        return RouteTable(routes=super().routes(num_layers).routes[::-1])


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (LowFirst(0.3), "'random' has the routes low, high; the first must be 'high'"),
        (LayerwiseRouter([0, 11, -1]), "'layerwise' has the routes layerwise; the first"),
    ],
)
def test_an_inner_router_without_high_as_its_first_route_is_refused(
    inner: Router, message: str
) -> None:
    """Tokens on its route 0 were taken as needy, whatever that route was."""
    with pytest.raises(ValueError, match=message):
        RequestLevelRouter(inner=inner, high_frac=0.5)


def test_calibration_leaves_a_budgeted_router_to_its_own_use() -> None:
    """It got a threshold for prompts alone, counted as ready and raised at its first generated token."""
    inner = RuleRouter(budget=Budget(high_frac=0.5))
    level = RequestLevelRouter(inner=inner, high_frac=0.5)
    extractor = level.extractor(TABLE)
    ids = [[row % 2, 1, 0, 1, 1, 0] for row in range(4)]
    prompts = [sequence_batch(one, row=row) for row, one in enumerate(ids)]
    level.calibrate([extractor.extract(prompt) for prompt in prompts])
    assert not level.needs_calibration and inner.needs_calibration
    served = [extractor.extract(sequence_batch(one, prompt_len=3)) for one in ids]
    version = level.version
    inner.calibrate(served)
    assert len(inner.route(served[0]).route_T) == 6
    assert level.version == version


def test_the_inner_router_is_asked_about_prompt_tokens_alone() -> None:
    """Guards an inner budget that was calibrated on prompts: it has no threshold for what follows."""
    inner = RuleRouter(budget=Budget(high_frac=0.5))
    level = RequestLevelRouter(inner=inner, high_frac=0.5)
    extractor = level.extractor(TABLE)
    prompts = [
        extractor.extract(sequence_batch([row % 2, 1, 0, 1, 1, 0], row=row)) for row in range(4)
    ]
    level.calibrate(prompts)
    assert isinstance(level.inner, RuleRouter)
    assert set(level.inner.thresholds) == {Phase.PREFILL}
    served = extractor.extract(sequence_batch([0, 1, 0, 1, 1, 0], prompt_len=4))
    assert len(level.route(served).route_T) == 6
    assert set(level.prompt_shares(served)) == {0}
