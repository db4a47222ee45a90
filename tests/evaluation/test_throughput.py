"""Guards against uncounted tokens, blocks instead of interleaving, and wrong latency formulas."""

from dataclasses import replace
from typing import Any

import pytest

from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.evaluation import throughput
from tokenrouter.evaluation.metrics import serving_sections
from tokenrouter.evaluation.progress import Tick
from tokenrouter.evaluation.rows import make_row
from tokenrouter.evaluation.throughput import Throughput, measure_throughput, run_requests
from tokenrouter.executors import ExecutorPool
from tokenrouter.models import LoadedModel
from tokenrouter.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tokenrouter.routers import LayerwiseRouter, RandomRouter
from tokenrouter.types import LayerSpan, Route, RouteInput, RouteTable, RoutingDecision
from tokenrouter.workloads import RequestSpec


def _requests(*shapes: tuple[int, int], arrival_s: float = 0.0) -> list[RequestSpec]:
    return [
        RequestSpec(
            prompt_ids=tuple(3 + (5 * i + prompt) % 250 for i in range(prompt)),
            params=SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True),
            arrival_s=arrival_s * index,
        )
        for index, (prompt, output) in enumerate(shapes)
    ]


def test_every_token_is_counted_once(model: LoadedModel, int8_pool: ExecutorPool) -> None:
    llm = LLM(model, router="rule", executors=int8_pool)
    run_requests(llm, _requests((9, 2)))
    result = run_requests(llm, _requests((5, 3), (40, 6), (20, 1)))
    assert (result.prompt_tokens, result.output_tokens) == (65, 10)
    assert [len(output.prompt_token_ids) for output in result.outputs] == [5, 40, 20]
    assert result.stats.output_tokens == 10
    assert sum(step["prefill_tokens"] for step in result.steps) == 65
    assert sum(step["output_tokens"] for step in result.steps) == 10
    assert sum(step["decided_tokens"] for step in result.steps) == 65 + 7
    assert 0.0 < result.high_frac < 1.0


def test_tokens_of_a_route_that_the_pool_lacks_count_as_high(model: LoadedModel) -> None:
    """Counters index the engine's table, which has one route more than the router's: the shares were of one layer."""
    llm = LLM(model, router=LayerwiseRouter(high_layers=[0]), executors="full")
    with pytest.warns(UserWarning, match="its tokens run on 'high'"):
        result = run_requests(llm, _requests((5, 3), (40, 6)))
    assert result.high_frac == 1.0
    routes = serving_sections(llm, [result])["routes"]
    assert list(routes) == ["layerwise", "high"]
    assert (routes["high"]["token_frac"], routes["high"]["executor"]) == (1.0, "full")
    shares = [routes[name]["high_layers_frac"] for name in ("layerwise", "high")]
    assert shares == [1 / model.config.num_layers, 1.0]
    assert (routes["layerwise"]["token_frac"], routes["layerwise"]["degraded_frac"]) == (0.0, 1.0)


class TwoLowRoutes(RandomRouter):
    """Half of the tokens high; the others on two routes of the low path, or on one mixed with high."""

    def __init__(self, other: Route) -> None:
        super().__init__(high_frac=0.5)
        self._other = other

    def routes(self, num_layers: int) -> RouteTable:
        return RouteTable(routes=(*super().routes(num_layers).routes, self._other))

    def route(self, inputs: RouteInput) -> RoutingDecision:
        decision = super().route(inputs)
        moved_T = (decision.route_T == 1) & (inputs.ids_T % 2 == 0)
        return replace(decision, route_T=decision.route_T.masked_fill(moved_T, 2))


@pytest.mark.parametrize("num_high", [0, 1])
def test_an_executors_time_is_shared_by_all_tokens_on_it(
    model: LoadedModel, int8_pool: ExecutorPool, num_high: int
) -> None:
    """All of the low path's time was divided by the tokens of one of its routes, so two routes doubled it."""
    layers = model.config.num_layers
    spans = (LayerSpan(0, num_high, "high"), LayerSpan(num_high, layers, "low"))
    other = Route(name="other", spans=spans[num_high == 0 :])
    llm = LLM(model, router=TwoLowRoutes(other), executors=int8_pool)
    result = run_requests(llm, _requests((50, 3), (40, 6)))
    routes = serving_sections(llm, [result])["routes"]
    high, low, mixed = (int(n) for n in result.stats.executed_tokens.sum(axis=0))
    assert min(high, low, mixed) > 0
    on_low = low + mixed * (layers - num_high) / layers
    on_high = high + mixed * num_high / layers
    path_s = result.stats.executor_s_by_path
    assert routes["low"]["ms_per_token"] == pytest.approx(1e3 * path_s["low"] / on_low)
    assert routes["high"]["ms_per_token"] == pytest.approx(1e3 * path_s["high"] / on_high)
    assert routes["other"].get("ms_per_token") == (
        None if num_high else routes["low"]["ms_per_token"]
    )


def test_stats_of_a_pass_outlive_the_next_pass(model: LoadedModel) -> None:
    llm = LLM(model)
    first = run_requests(llm, _requests((5, 3)))
    run_requests(llm, _requests((5, 30)))
    assert first.stats.output_tokens == 3


def test_every_systems_row_says_what_its_preemptions_cost(model: LoadedModel) -> None:
    """systems.json had the slots of a system's peak, and not what others lost to it."""
    options = EngineOptions(num_kv_slots=90, max_num_seqs=4)
    llm = LLM(model, options=options)
    passes = tuple(run_requests(llm, _requests(*[(n, 30)] * 4)) for n in (20, 2))
    row = make_row(
        "all_high",
        chosen=False,
        throughput=Throughput(repeats=passes),
        slo=None,
        match=None,
        quality=None,
        reference_ppl=None,
    )
    counts = [repeat.stats.num_preemptions for repeat in passes]
    again = [repeat.stats.reused_tokens for repeat in passes]
    assert counts[0] > counts[1] and again[0] > again[1]
    assert (row.preemptions, row.swaps_out, row.recomputed_tokens) == (counts[0], 0, again[0])


def test_systems_take_turns(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    llms = {"a": LLM(model), "b": LLM(model), "c": LLM(model)}
    order: list[str] = []
    run = throughput.run_requests

    def record(llm: LLM, requests: list[RequestSpec], tick: Tick):  # type: ignore[no-untyped-def]
        order.append(next(name for name, known in llms.items() if known is llm))
        return run(llm, requests, tick)

    monkeypatch.setattr(throughput, "run_requests", record)
    measure_throughput(llms, _requests((4, 2)), num_repeats=2)
    assert order == ["a", "b", "c", "a", "b", "c"]


def test_requests_are_added_in_the_order_of_arrival_then_of_the_list(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that arrive at once the last was served first, behind a full queue too."""
    llm = LLM(model, options=EngineOptions(max_num_seqs=1, max_num_waiting=2))
    added: list[str] = []
    add = llm.engine.add_request

    def watched(request_id: str, *args: Any, **options: Any) -> None:
        added.append(request_id)
        add(request_id, *args, **options)

    monkeypatch.setattr(llm.engine, "add_request", watched)
    late, *at_once = _requests(*[(4, 2)] * 6)
    result = run_requests(llm, [replace(late, arrival_s=0.001), *at_once])
    assert added == ["1", "2", "3", "4", "5", "0"]
    first_s = [output.outputs[0].metrics.first_token_s for output in result.outputs]  # type: ignore[union-attr]
    assert sorted(range(6), key=first_s.__getitem__) == [1, 2, 3, 4, 5, 0]


def test_a_refused_request_ends_the_measurement(model: LoadedModel) -> None:
    with pytest.raises(ValueError, match="model's length"):
        run_requests(LLM(model), _requests((5000, 2)))


def test_no_repeats_are_refused(model: LoadedModel) -> None:
    with pytest.raises(ValueError, match="num_repeats must be at least 1, got 0"):
        measure_throughput({"a": LLM(model)}, _requests((4, 2)), num_repeats=0)


def _output(times: tuple[float, ...]) -> RequestOutput:
    metrics = RequestMetrics(
        arrival_s=1.0,
        first_scheduled_s=1.5,
        first_token_s=times[0],
        finished_s=times[-1],
        queue_s=0.25,
        token_times_s=times,
        num_preemptions=0,
    )
    completion = CompletionOutput(
        index=0, text="", delta="", token_ids=(7,) * len(times), metrics=metrics
    )
    return RequestOutput(
        request_id="0", prompt=None, prompt_token_ids=(1,), outputs=(completion,), finished=True
    )


def test_latencies_follow_their_definitions(model: LoadedModel) -> None:
    base = run_requests(LLM(model), _requests((4, 2)))
    passes = replace(base, outputs=(_output((2.0, 2.5, 4.0)), _output((3.0,))))
    found = Throughput(repeats=(passes,)).latency()
    mean = {name: value["mean"] for name, value in found.items() if value is not None}
    assert mean == pytest.approx(
        {
            "ttft_ms": 1500.0,  # (1000 + 2000) / 2
            "tpot_ms": 1000.0,  # (e2e - ttft) / (n - 1); one token has none
            "itl_ms": 1000.0,  # gaps 500 and 1500
            "e2e_ms": 2500.0,
            "queue_ms": 250.0,
        }
    )


def test_without_gaps_there_is_no_inter_token_latency(model: LoadedModel) -> None:
    found = Throughput(repeats=(run_requests(LLM(model), _requests((4, 1))),)).latency()
    assert found["tpot_ms"] is None and found["itl_ms"] is None and found["ttft_ms"] is not None
