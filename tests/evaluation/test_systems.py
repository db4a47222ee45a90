"""Guards against unequal baselines: other pools, other budgets, a doubled or a missing system."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tokenrouter import EngineOptions
from tokenrouter.evaluation.systems import SystemsBuilder, calibration_passages
from tokenrouter.executors import ExecutorPool, build_pool
from tokenrouter.kvcache.retention import RetentionOptions, SinkWindow
from tokenrouter.models import LoadedModel
from tokenrouter.routers import (
    AllHighRouter,
    Budget,
    CompositeRouter,
    IntervalRouter,
    LayerwiseRouter,
    RandomRouter,
    RequestLevelRouter,
    Router,
    RuleRouter,
)
from tokenrouter.scheduler import FCFSScheduler, StaticBatchScheduler
from tokenrouter.types import Phase, RouteTable
from tokenrouter.workloads import LengthMix

TEXT = [3 + (i * i + i // 7) % 250 for i in range(4000)]
REQUESTS = LengthMix(
    prompt_lengths=[10, 20, 30, 40, 50, 60, 70, 80], output_min=2, output_max=6
).requests(lambda text: [3 + byte % 250 for byte in text.encode()], TEXT)
ALL = ["all_high", "all_low", "request_level", "static_batch"]


def _builder(model: LoadedModel, pool: ExecutorPool) -> SystemsBuilder:
    return SystemsBuilder(
        model=model,
        pool=pool,
        options=EngineOptions(),
        requests=REQUESTS,
        calibration_ids=calibration_passages(REQUESTS, TEXT, seed=0),
    )


@pytest.mark.parametrize(
    ("router", "names"),
    [
        (RuleRouter(), [*ALL, "rule"]),
        (LayerwiseRouter(high_layers=[0]), [*ALL, "layerwise"]),
        (AllHighRouter(), ALL),
        (RequestLevelRouter(high_frac=0.3), ALL),
    ],
)
def test_all_systems_once_and_a_baseline_only_once(
    model: LoadedModel, int8_pool: ExecutorPool, router: Router, names: list[str]
) -> None:
    systems = _builder(model, int8_pool).build(router)
    assert sorted(systems.llms) == sorted(names)
    assert systems.chosen_llm.router is router and not systems.notes


def test_they_differ_in_router_and_scheduler_only(
    model: LoadedModel, int8_pool: ExecutorPool
) -> None:
    llms = _builder(model, int8_pool).build(RuleRouter()).llms
    assert {id(llm.pool) for llm in llms.values()} == {id(int8_pool)}
    assert {id(llm.model) for llm in llms.values()} == {id(model)}
    static = {name for name, llm in llms.items() if llm.options.scheduler == "static_batch"}
    assert static == {"static_batch"}
    assert isinstance(llms["static_batch"].engine.scheduler, StaticBatchScheduler)
    assert isinstance(llms["rule"].engine.scheduler, FCFSScheduler)
    assert llms["static_batch"].router.name == "all_high"


def test_request_level_has_the_budget_of_the_token_router(
    model: LoadedModel, int8_pool: ExecutorPool
) -> None:
    systems = _builder(model, int8_pool).build(RuleRouter())
    router = systems.request_router
    assert router is not None and router.high_frac is not None and router.inner.name == "rule"
    chosen = systems.chosen_llm.engine.stats.token_frac("high")
    assert router.high_frac == pytest.approx(chosen)
    assert router.inner is systems.chosen_llm.router


def test_without_a_low_path_the_low_baselines_are_left_out_with_a_note(model: LoadedModel) -> None:
    builder = _builder(model, build_pool("full", model))
    with pytest.warns(UserWarning, match="asks for route 'low'"):
        systems = builder.build(RuleRouter())
    assert sorted(systems.llms) == ["all_high", "rule", "static_batch"]
    assert systems.request_router is None and "no low path" in systems.notes[0]


def test_a_budget_is_calibrated_before_anything_runs(
    model: LoadedModel, int8_pool: ExecutorPool
) -> None:
    router = RuleRouter(budget=Budget(high_frac=0.2))
    systems = _builder(model, int8_pool).build(router)
    assert not router.needs_calibration
    assert 0.02 < systems.chosen_llm.engine.stats.token_frac("high") < 0.6


@pytest.mark.parametrize("serve", [True, False])
def test_request_level_around_a_budget_calibrates_the_inner_router_first(
    model: LoadedModel, int8_pool: ExecutorPool, serve: bool
) -> None:
    """Shares of needy tokens were asked of an inner router that had no thresholds yet: it raised."""
    inner = RuleRouter(budget=Budget(high_frac=0.2))
    router = RequestLevelRouter(inner=inner, high_frac=0.4)
    systems = _builder(model, int8_pool).build(router, serve=serve)
    assert not router.inner.needs_calibration and not router.needs_calibration
    assert systems.request_router is router


@pytest.mark.parametrize("wrap", [lambda router: router, IntervalRouter], ids=["bare", "wrapped"])
def test_request_level_beside_a_composite_router_goes_by_its_precision(
    model: LoadedModel, int8_pool: ExecutorPool, wrap: Callable[[Router], Router]
) -> None:
    """Its routes are pairs, and the rules ranked the requests in place of the router that the run is about."""
    precision = RandomRouter(high_frac=0.3)
    systems = _builder(model, int8_pool).build(
        wrap(CompositeRouter(precision=precision, retention=RuleRouter()))
    )
    router, stats = systems.request_router, systems.chosen_llm.engine.stats
    assert router is not None and router.inner is precision
    high = stats.token_frac("high+protect") + stats.token_frac("high+normal")
    assert router.high_frac == pytest.approx(high) and 0.0 < high < 1.0


class DecodeOnly(RandomRouter):
    """Decides generated tokens alone; prompts take route 0."""

    phases = frozenset({Phase.DECODE})


class LowFirst(RandomRouter):
    """Its route 0 is low."""

    def routes(self, num_layers: int) -> RouteTable:
        return RouteTable(routes=super().routes(num_layers).routes[::-1])


@pytest.mark.parametrize("router", [DecodeOnly(0.5), LowFirst(0.5)])
def test_a_router_that_cannot_say_who_is_needy_is_compared_by_the_rules(
    model: LoadedModel, int8_pool: ExecutorPool, router: Router
) -> None:
    """The comparison ended in the baseline's refusal of its inner router, or took low tokens for needy ones."""
    systems = _builder(model, int8_pool).build(router, serve=False)
    assert systems.request_router is not None and systems.request_router.inner.name == "rule"


def test_without_serving_only_what_quality_needs_is_built(
    model: LoadedModel, int8_pool: ExecutorPool
) -> None:
    systems = _builder(model, int8_pool).build(RuleRouter(), serve=False)
    assert sorted(systems.llms) == ["all_high", "all_low", "rule"]
    assert systems.request_router is not None
    assert systems.chosen_llm.engine.stats.steps == 0


def test_calibration_passages_are_long_enough_and_repeatable() -> None:
    first, second = (calibration_passages(REQUESTS, TEXT, seed=1) for _ in range(2))
    assert first == second != calibration_passages(REQUESTS, TEXT, seed=2)
    assert sum(map(len, first)) >= 12_288


@pytest.mark.parametrize("router", [RuleRouter(), AllHighRouter()])
def test_baselines_keep_every_entry_as_it_is(
    model: LoadedModel, int8_pool: ExecutorPool, router: Router
) -> None:
    """What retention costs measured against baselines that evict as well, or no baseline left to measure against."""
    retention = RetentionOptions(policy=SinkWindow(), interval=16, window=1, recent=4)
    options = EngineOptions(retention=retention, kv_cache_dtype="int8")
    systems = replace(_builder(model, int8_pool), options=options).build(router)
    name = "all_high+sink_window+int8" if router.name == "all_high" else "rule"
    assert systems.chosen == name and set(systems.llms) == {*ALL, name}
    for other, llm in (systems.llms | systems.scored).items():
        expected = options if other == name else EngineOptions()
        assert llm.options.retention == expected.retention, other
        assert llm.options.kv_cache_dtype == expected.kv_cache_dtype, other
    assert systems.chosen_llm.engine.stats.evicted_entries > 0


def test_baselines_have_slots_for_whole_requests(
    model: LoadedModel, int8_pool: ExecutorPool
) -> None:
    """A pool that is large enough because entries are evicted, and a job that fails when its baselines start."""
    policy = SinkWindow(evicted_frac=0.0, max_entries=16)
    retention = RetentionOptions(policy=policy, interval=8, window=4, sinks=2, recent=3)
    options = EngineOptions(num_kv_slots=40, retention=retention)
    builder = replace(_builder(model, int8_pool), options=options)
    longest = max(len(r.prompt_ids) + r.max_output_tokens for r in REQUESTS)
    assert builder.plain_options.num_kv_slots == longest > 40
    systems = builder.build(RuleRouter())
    assert systems.chosen_llm.engine.pool.num_slots == 40
    assert systems.llms["all_high"].engine.pool.num_slots == longest
    assert f"needs {longest} KV slots: all_high and the other" in " ".join(systems.notes)
    roomy = replace(builder, options=replace(options, num_kv_slots=longest)).build(RuleRouter())
    assert not roomy.notes
