"""Guards the grouping of a step into forwards: nothing lost or doubled, waits bounded, prompts never kept waiting."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.dispatch_steps import (
    CHEAP_LOW,
    PROPORTIONAL,
    last,
    numbers,
    step_of,
    table,
)
from tests.engine.tools import greedy, prompts, run_all, tiny, tokens, twin
from tokenrouter import LLM, EngineOptions
from tokenrouter.engine import costs as costs_module
from tokenrouter.engine.costs import SIZES, CostModel, measure
from tokenrouter.engine.dispatcher import Dispatcher
from tokenrouter.executors import build_pool
from tokenrouter.executors.base import Executor
from tokenrouter.models import LoadedModel
from tokenrouter.routers import RandomRouter, Router
from tokenrouter.types import Route, RouteTable

chunk_lists = st.lists(
    st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 6)), min_size=1, max_size=14
)


@settings(max_examples=300, deadline=None)
@given(
    chunks=chunk_lists,
    left=st.lists(st.integers(1, 5), min_size=14, max_size=14),
    mode=st.sampled_from(["mixed", "queued", "auto"]),
    min_batch=st.integers(1, 6),
    waits=st.tuples(*[st.one_of(st.none(), st.integers(0, 7))] * 3),
    max_wait=st.integers(0, 5),
    costs=st.sampled_from([CHEAP_LOW, PROPORTIONAL]),
)
def test_every_chunk_runs_once_or_waits_within_its_bound(
    chunks: list[tuple[bool, int, int]],
    left: list[int],
    mode: str,
    min_batch: int,
    waits: tuple[int | None, ...],
    max_wait: int,
    costs: CostModel,
) -> None:
    """A chunk in two forwards or in none; a step that runs nothing; a token kept beyond its bound."""
    routes = table(*waits)
    dispatcher = Dispatcher(
        routes,
        [next(iter(route.executors)) for route in routes.routes],
        mode=mode,  # type: ignore[arg-type]
        min_batch=min_batch,
        max_wait_steps=max_wait,
        costs=costs,
    )
    step, executed_T = step_of(chunks)
    last(step, left)
    forwards, deferred = numbers(dispatcher.dispatch(step, executed_T))
    running = [c for forward in forwards for c in forward]
    assert sorted([*running, *deferred]) == list(range(len(chunks)))
    assert running, "a step must run something"
    assert all(forwards), "an empty forward"
    assert all(chunks[c][0] for c in deferred), "a prompt chunk was deferred"
    for c in deferred:
        _, route, waited = chunks[c]
        bound = max_wait if waits[route] is None else waits[route]
        assert waited < bound
        if mode == "queued":
            assert sum(chunks[d][1] == route for d in deferred) < min_batch
    if mode == "mixed" or (mode == "auto" and not all(decoding for decoding, _, _ in chunks)):
        assert not deferred
    if mode != "queued":
        assert len(forwards) == 1
    for forward in forwards:
        assert forward == sorted(forward), "order within a forward"
        kinds = {chunks[c][0] for c in forward}
        decode_routes = {chunks[c][1] for c in forward if chunks[c][0]}
        if mode == "queued":
            assert len(kinds) == 1 and (kinds == {False} or len(decode_routes) == 1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("min_batch", "max_wait", "low_wait"), [(4, 3, None), (50, 5, 2), (2, 1, None), (50, 0, 1)]
)
def test_no_decode_token_waits_longer_than_its_route_allows(
    seed: int, min_batch: int, max_wait: int, low_wait: int | None
) -> None:
    """A token that starves in its queue, in a real run with requests that come and go."""

    class Patient(RandomRouter):
        def routes(self, num_layers: int) -> RouteTable:
            low = Route.uniform("low", "low", num_layers, max_wait_steps=low_wait)
            return RouteTable(routes=(Route.uniform("high", "high", num_layers), low))

    llm = LLM(
        tiny(),
        router=Patient(0.3, seed),
        executors=twin(),
        options=EngineOptions(
            dispatch="queued",
            min_batch=min_batch,
            max_wait_steps=max_wait,
            max_num_seqs=7,
            max_num_batched_tokens=30,
        ),
    )
    for index, prompt in enumerate(prompts()[:12]):
        llm.engine.add_request(str(index), prompt, greedy(3 + index), stream=False)
    longest = 0

    def check() -> None:
        nonlocal longest
        for one in llm.engine.scheduler.running:
            if one.decoding:
                route = int(one.requested_N[one.num_computed])
                bound = low_wait if route == 1 and low_wait is not None else max_wait
                assert one.waited_steps <= bound
                longest = max(longest, one.waited_steps)

    last = run_all(llm, check)
    assert all(len(tokens(last[str(index)])) == 3 + index for index in range(12))
    assert longest == max(max_wait, low_wait or 0), "nobody ever waited: nothing was tested"


def test_waiting_counts_as_queue_time() -> None:
    """Latency that hides what queueing costs the request."""
    times = {}
    for dispatch in ("mixed", "queued"):
        llm = LLM(
            tiny(),
            router=RandomRouter(0.5),
            executors=twin(),
            options=EngineOptions(dispatch=dispatch, min_batch=50, max_wait_steps=6),  # type: ignore[arg-type]
        )
        outputs = llm.generate(prompts()[:4], greedy(20))
        times[dispatch] = [output.outputs[0].metrics for output in outputs]
    for metrics in times["queued"] + times["mixed"]:
        assert metrics is not None
        assert len(metrics.token_times_s) == 20
        assert list(metrics.token_times_s) == sorted(metrics.token_times_s)
        assert metrics.arrival_s <= metrics.first_scheduled_s <= metrics.first_token_s
        assert metrics.token_times_s[-1] <= metrics.finished_s
        assert 0 <= metrics.queue_s <= metrics.finished_s - metrics.arrival_s
    for metrics in times["mixed"]:
        assert metrics is not None
        assert metrics.queue_s == pytest.approx(metrics.first_scheduled_s - metrics.arrival_s)
    waited = [m.queue_s - (m.first_scheduled_s - m.arrival_s) for m in times["queued"] if m]
    assert all(w > 0 for w in waited)


def test_cost_model() -> None:
    """A wrong bracket of the interpolation; costs beyond the last size that stay flat."""
    seconds = (1.0, 2.0, 4.0, 8.0)
    model = CostModel(seconds={"high": seconds})
    assert [model.tokenwise_s("high", size) for size in SIZES] == list(seconds)
    assert model.tokenwise_s("high", 0) == 0
    assert model.tokenwise_s("high", 2 * SIZES[-1]) == 16.0
    middle = (SIZES[1] + SIZES[2]) / 2
    assert model.tokenwise_s("high", middle) == pytest.approx(3.0)
    assert model.saved_s("high", SIZES[1], SIZES[1]) == 0
    assert model.saved_s("high", SIZES[0], SIZES[1]) == pytest.approx(1 - 2 / SIZES[1])
    times = [model.tokenwise_s("high", n) for n in range(200)]
    assert times == sorted(times)


def test_measured_costs_are_positive() -> None:
    """A probe that runs nothing makes every mode look free."""
    costs = measure(twin().executors, tiny())
    assert set(costs.seconds) == {"high", "low"}
    assert all(len(s) == len(SIZES) and min(s) > 0 for s in costs.seconds.values())
    with torch.inference_mode():
        assert costs.tokenwise_s("high", 1) > 0


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[Executor]:
    """Fills with the executors that are measured."""
    measured: list[Executor] = []
    real = costs_module._measure

    def counted(executor: Executor, model: LoadedModel) -> tuple[float, ...]:
        measured.append(executor)
        return real(executor, model)

    monkeypatch.setattr(costs_module, "_measure", counted)
    return measured


def test_engines_on_one_pool_share_what_was_measured(probes: list[Executor]) -> None:
    """A second per engine at start-up, and costs that differ between the systems of one comparison."""
    pool = build_pool("int8", tiny())
    for _ in range(2):
        llm = LLM(tiny(), router=RandomRouter(0.5), executors=pool)
        assert llm.engine._parts.dispatcher.mode == "auto"
    assert probes == list(pool.executors.values())
    LLM(tiny(), router=RandomRouter(0.5), executors=build_pool("int8", tiny()))
    assert len(probes) == 4, "another pool has costs of its own"


def test_measured_costs_do_not_keep_a_pool_alive() -> None:
    """A cache that holds the weights of every model that was ever loaded."""
    pool = build_pool("int8", tiny())
    gone = weakref.ref(pool.executors["low"])
    LLM(tiny(), router=RandomRouter(0.5), executors=pool)
    del pool
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "router", ["all_high", "all_low", "layerwise", RandomRouter(0.0), RandomRouter(1.0)]
)
def test_nothing_is_measured_where_one_executor_does_all(
    router: Router | str, probes: list[Executor]
) -> None:
    """A start-up that times what no step will ever weigh."""
    llm = LLM(tiny(), router=router, executors=build_pool("int8", tiny()))
    assert llm.engine._parts.dispatcher.mode == "mixed"
    assert not probes


def test_shared_weights_are_mixed(probes: list[Executor]) -> None:
    """Waiting for company saves a second stream of weights: with one set there is none to save."""
    model = tiny()
    shared, separate = build_pool("int8_shared", model), build_pool("int8", model)
    assert shared.shares_weights and not separate.shares_weights
    assert not build_pool("full", model).shares_weights
    llm = LLM(model, router=RandomRouter(0.5), executors=shared)
    assert llm.engine._parts.dispatcher.mode == "mixed" and probes == []


@pytest.mark.parametrize("pool", ["int8", "int8_shared"])
def test_opaque_weights_can_be_compared(pool: str) -> None:
    """oneDNN's packed bfloat16 weights have no address: a pool on the reference kernels could not be built."""
    model = tiny().astype("bfloat16")
    executors = build_pool(pool, model, kernels="reference")
    assert executors.shares_weights is (pool == "int8_shared")
    LLM(model, router=RandomRouter(0.5), executors=executors).generate(["a"])
