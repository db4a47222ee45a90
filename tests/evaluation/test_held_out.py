"""Guards against a budget that holds in requests and is missed where quality is measured."""

import pytest

from tokenrouter import LLM, EngineOptions
from tokenrouter.evaluation.held_out import HeldOutWindows
from tokenrouter.evaluation.quality import Quality, QualitySettings, measure_quality
from tokenrouter.evaluation.systems import Systems, SystemsBuilder, calibration_passages
from tokenrouter.executors import ExecutorPool
from tokenrouter.models import LoadedModel
from tokenrouter.routers import (
    Budget,
    RandomRouter,
    RequestLevelRouter,
    Router,
    RuleRouter,
)
from tokenrouter.types import Phase
from tokenrouter.workloads import LengthMix, windows

BUDGET, LENGTH, DECODE = 0.2, 320, 48
TEXT = [3 + (i * i + i // 7) % 250 for i in range(16_000)]
HELD_OUT = [3 + (i * i + i // 11 + 5) % 250 for i in range(16_000)]
REQUESTS = LengthMix(prompt_lengths=[10, 20, 30, 40], output_min=8, output_max=12).requests(
    lambda text: [3 + byte % 250 for byte in text.encode()], TEXT
)
SETTINGS = QualitySettings(
    window_tokens=LENGTH, num_windows=6, decode_tokens=DECODE, decode_windows=6
)


def _rules() -> RuleRouter:
    return RuleRouter(budget=Budget(high_frac=BUDGET))


def _build(
    model: LoadedModel, pool: ExecutorPool, router: Router, *, scores: bool = True
) -> Systems:
    held_out = HeldOutWindows(text_ids=HELD_OUT, window_tokens=LENGTH, decode_tokens=DECODE)
    return SystemsBuilder(
        model=model,
        pool=pool,
        options=EngineOptions(dispatch="mixed"),
        requests=REQUESTS,
        calibration_ids=calibration_passages(REQUESTS, HELD_OUT, seed=0),
        held_out=held_out if scores else None,
    ).build(router, serve=False)


def _quality(model: LoadedModel, llm: LLM) -> Quality:
    texts = windows(TEXT, LENGTH, SETTINGS.num_windows)
    return measure_quality(LLM(model), {"run": llm}, texts, SETTINGS).systems["run"]


def test_a_budget_is_met_in_windows_longer_than_requests(
    model: LoadedModel, int8_pool: ExecutorPool
) -> None:
    """Thresholds of passages as long as requests let 1.3 % of prefill and 0 % of decode pass, of 10 %."""
    systems = _build(model, int8_pool, _rules())
    found = _quality(model, systems.scored["rule"])
    assert found.high_frac == pytest.approx(BUDGET, rel=0.25)
    assert found.decode_high_frac == pytest.approx(BUDGET, rel=0.25)
    assert found.routes["high"]["decode_token_frac"] == found.decode_high_frac
    missed = _quality(model, systems.chosen_llm)
    assert missed.high_frac < 0.75 * BUDGET and (missed.decode_high_frac or 0.0) < 0.75 * BUDGET


def test_throughput_keeps_its_thresholds_and_shares_no_router(
    model: LoadedModel, int8_pool: ExecutorPool
) -> None:
    """One instance for both engines would serve requests with the thresholds of the windows."""
    router = _rules()
    systems = _build(model, int8_pool, router)
    alone = _build(model, int8_pool, _rules(), scores=False)
    assert systems.chosen_llm.router is router
    assert router.version == alone.chosen_llm.router.version
    assert alone.scored["rule"] is alone.chosen_llm and not alone.notes
    assert systems.scored["rule"].router is not router
    assert systems.scored["rule"].router.version != router.version
    assert systems.scored["rule"].pool is int8_pool
    assert systems.scored["rule"].router.version in systems.notes[0]


@pytest.mark.parametrize("router", [RuleRouter(), RandomRouter(0.3)])
def test_without_a_budget_one_engine_serves_and_is_scored(
    model: LoadedModel, int8_pool: ExecutorPool, router: Router
) -> None:
    systems = _build(model, int8_pool, router)
    assert systems.scored[router.name] is systems.chosen_llm and not systems.notes
    assert systems.ranking_router is systems.request_router is not None


def test_request_level_ranks_windows_with_the_thresholds_of_the_scored_router(
    model: LoadedModel, int8_pool: ExecutorPool
) -> None:
    """Windows would be ranked by the few tokens that the requests' thresholds call needy."""
    systems = _build(model, int8_pool, _rules())
    assert systems.ranking_router is not None and systems.request_router is not None
    assert systems.ranking_router.inner is systems.scored["rule"].router
    assert systems.request_router.inner is systems.chosen_llm.router


def test_a_chosen_request_level_with_a_budget_inside_ranks_windows_by_it(
    model: LoadedModel, int8_pool: ExecutorPool
) -> None:
    router = RequestLevelRouter(inner=_rules(), high_frac=0.4)
    systems = _build(model, int8_pool, router)
    alone = RequestLevelRouter(inner=_rules(), high_frac=0.4)
    assert _build(model, int8_pool, alone, scores=False).chosen_llm.router.version == router.version
    assert sorted(systems.scored) == ["all_high", "all_low"]
    ranking = systems.ranking_router
    assert ranking is not None and ranking is not router and ranking.high_frac == 0.4
    assert ranking.inner.version != router.inner.version


def test_only_phases_that_are_scored_get_thresholds(model: LoadedModel) -> None:
    """Forced decode is left out by evaluation.decode_windows=0: there is nothing to calibrate on."""
    held_out = HeldOutWindows(text_ids=HELD_OUT, window_tokens=LENGTH, decode_tokens=0)
    router = held_out.calibrated(_rules(), LLM(model).token_types)
    assert isinstance(router, RuleRouter) and set(router.thresholds) == {Phase.PREFILL}


def test_a_router_with_thresholds_keeps_them(model: LoadedModel) -> None:
    held_out = HeldOutWindows(text_ids=HELD_OUT, window_tokens=LENGTH, decode_tokens=DECODE)
    types = LLM(model).token_types
    router = held_out.calibrated(_rules(), types)
    assert held_out.calibrated(router, types) is router


def test_a_text_shorter_than_a_window_is_refused_for_a_budget_alone(model: LoadedModel) -> None:
    held_out = HeldOutWindows(text_ids=HELD_OUT[:100], window_tokens=LENGTH, decode_tokens=0)
    types = LLM(model).token_types
    with pytest.raises(ValueError, match=r"passage of 320 tokens .* side has 100: use shorter"):
        held_out.calibrated(_rules(), types)
    rules = RuleRouter()
    assert held_out.calibrated(rules, types) is rules


def test_passages_are_windows_of_the_whole_text() -> None:
    held_out = HeldOutWindows(text_ids=HELD_OUT, window_tokens=LENGTH, decode_tokens=0)
    passages = held_out.passages()
    assert {len(ids) for ids in passages} == {LENGTH} and len(passages) == 64
    assert passages[0] == HELD_OUT[:LENGTH] and passages[-1] == HELD_OUT[-LENGTH:]
    whole = HeldOutWindows(text_ids=HELD_OUT[:LENGTH], window_tokens=LENGTH, decode_tokens=0)
    assert whole.passages() == [HELD_OUT[:LENGTH]]
