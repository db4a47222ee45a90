"""Guards `auto` dispatch: who waits for company, that it is worth it, and that nobody waits too long."""

from collections import Counter

import pytest
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
from tokenrouter.engine.costs import CostModel
from tokenrouter.engine.dispatcher import Dispatcher
from tokenrouter.routers import RandomRouter
from tokenrouter.types import Route, RouteTable

MEASURED = CostModel(seconds={"high": (1.0, 1.1, 2.0, 5.0), "low": (0.3, 0.4, 0.9, 3.0)})
EXECUTORS = (["high", "low", "low"], ["high", "low", "high"], ["high", "low", "third"])


def with_third(costs: CostModel) -> CostModel:
    return CostModel(seconds={**costs.seconds, "third": costs.seconds["high"]})


decode_chunks = st.lists(
    st.tuples(
        st.just(True),
        st.sampled_from([0, 1, 1, 1, 1, 2]),
        st.sampled_from([0, 0, 0, 0, 1, 2, 3, 5]),
    ),
    min_size=2,
    max_size=14,
)


def test_whole_executors_wait_within_bounds() -> None:
    """A route that may not wait made to wait by another route of its executor, the executor with most tokens made to
    wait, a wait that makes the run longer, or a token that is kept beyond its bound."""
    deferred_steps: Counter[int] = Counter()

    @settings(max_examples=1500, deadline=None, derandomize=True, database=None)
    @given(
        chunks=decode_chunks,
        left=st.lists(st.integers(1, 6), min_size=14, max_size=14),
        executors=st.sampled_from(EXECUTORS),
        min_batch=st.integers(1, 20),
        waits=st.tuples(*[st.sampled_from([None, None, 0, 1, 2, 3, 6])] * 3),
        max_wait=st.integers(0, 6),
        costs=st.sampled_from([CHEAP_LOW, CHEAP_LOW, MEASURED, PROPORTIONAL]),
    )
    def check(
        chunks: list[tuple[bool, int, int]],
        left: list[int],
        executors: list[str],
        min_batch: int,
        waits: tuple[int | None, ...],
        max_wait: int,
        costs: CostModel,
    ) -> None:
        dispatcher = Dispatcher(
            table(*waits),
            executors,
            min_batch=min_batch,
            max_wait_steps=max_wait,
            costs=with_third(costs),
        )
        step, executed_T = step_of(chunks)
        last(step, left)
        (running,), deferred = numbers(dispatcher.dispatch(step, executed_T))
        assert running and sorted([*running, *deferred]) == list(range(len(chunks)))
        of = [executors[route] for _, route, _ in chunks]
        sizes = Counter(of)
        assert not {of[c] for c in running} & {of[c] for c in deferred}, "a part of an executor"
        assert max(sizes[of[c]] for c in running) == max(sizes.values()), "the largest waits"
        for c in deferred:
            _, route, waited = chunks[c]
            assert waited < (max_wait if waits[route] is None else waits[route])
            assert left[c] < max(left[r] for r in running)
            assert sizes[of[c]] < max(min_batch, -(-len(chunks) // 3))
        assert costs is not PROPORTIONAL or not deferred, "company saves nothing"
        deferred_steps[len({of[c] for c in deferred})] += 1

    check()
    assert deferred_steps[1] > 100 and deferred_steps[2] > 0, "hardly anybody ever waited"


def test_auto_follows_the_costs() -> None:
    """Queueing where mixing is as cheap, or mixing where a second stream of weights costs a whole step."""
    step, executed_T = step_of([(True, 0, 0)] + [(True, 1, 0)] * 6)
    step.state_C["max_total"][0] -= 1
    executors = ["high", "low"]
    queue = Dispatcher(table(None, None), executors, costs=CHEAP_LOW).dispatch(step, executed_T)
    assert numbers(queue) == ([[1, 2, 3, 4, 5, 6]], [0])
    mix = Dispatcher(table(None, None), executors, costs=PROPORTIONAL).dispatch(step, executed_T)
    assert not len(mix.deferred) and len(mix.forwards) == 1
    step, executed_T = step_of([(False, 0, 0), (True, 0, 0), (True, 1, 0)])
    with_prompt = Dispatcher(table(None, None), executors, costs=CHEAP_LOW)
    assert numbers(with_prompt.dispatch(step, executed_T)) == ([[0, 1, 2]], [])


def test_two_routes_of_one_executor_do_not_queue_for_each_other() -> None:
    """Routes that share an executor share its weights: keeping them apart gains nothing."""
    step, executed_T = step_of([(True, 1, 0), (True, 2, 0), (True, 2, 0)])
    dispatcher = Dispatcher(table(None, None, None), ["high", "low", "low"], costs=CHEAP_LOW)
    assert not len(dispatcher.dispatch(step, executed_T).deferred)


def test_auto_waits_only_while_a_longer_request_runs() -> None:
    """The last requests of a run stand still for a batch that never fills: the run got a sixth slower."""
    dispatcher = Dispatcher(table(None, None), ["high", "low"], costs=CHEAP_LOW, max_wait_steps=4)
    chunks = [(True, 0, 0), (True, 0, 1)] + [(True, 1, 0)] * 6
    for left, waits in ([(5, 6), True], [(5, 9), False], [(9, 5), False], [(8, 8), True]):
        step, executed_T = step_of(chunks)
        last(step, [*left, *[9] * 6])
        forwards, deferred = numbers(dispatcher.dispatch(step, executed_T))
        assert deferred == ([0, 1] if waits else [])
        assert forwards == [list(range(2 if waits else 0, 8))], "always one forward"


def test_auto_takes_a_third_of_the_step_as_company() -> None:
    """Two streams of weights in most steps of a large batch, whose four high tokens always come together."""
    for num_low, waits in ((6, False), (8, False), (9, True), (20, True)):
        step, executed_T = step_of([(True, 0, 0)] * 4 + [(True, 1, 0)] * num_low)
        step.state_C["max_total"][:4] -= 1
        dispatcher = Dispatcher(table(None, None), ["high", "low"], costs=CHEAP_LOW, min_batch=2)
        assert bool(len(dispatcher.dispatch(step, executed_T).deferred)) is waits


def test_a_route_that_may_not_wait_takes_its_executor_along() -> None:
    """Only the route that was looked at last decides for its executor: half of it runs, or a bound is missed."""
    chunks = [(True, 0, 0), (True, 2, 0)] + [(True, 1, 0)] * 6
    for waits, defers in (
        [(None, None, None), True],
        [(0, None, None), False],
        [(None, None, 0), False],
    ):
        for reverse in (False, True):
            order = chunks[::-1] if reverse else chunks
            step, executed_T = step_of(order)
            step.state_C["max_total"] -= [route != 1 for _, route, _ in order]
            dispatcher = Dispatcher(table(*waits), ["high", "low", "high"], costs=CHEAP_LOW)
            found = {order[c][1] for c in dispatcher.dispatch(step, executed_T).deferred}
            assert found == ({0, 2} if defers else set()), (waits, reverse)


@pytest.mark.parametrize("waited", range(5))
def test_the_last_step_of_a_wait(waited: int) -> None:
    """One step more than the bound."""
    step, executed_T = step_of([(True, 0, waited)] + [(True, 1, 0)] * 6)
    step.state_C["max_total"][0] -= 1
    dispatcher = Dispatcher(table(3, None), ["high", "low"], costs=CHEAP_LOW, max_wait_steps=9)
    assert bool(len(dispatcher.dispatch(step, executed_T).deferred)) is (waited < 3)


@pytest.mark.parametrize(
    ("max_wait", "route_wait"), [(0, None), (1, None), (3, None), (7, None), (7, 2), (2, 5)]
)
def test_the_bound_binds_in_an_engine(max_wait: int, route_wait: int | None) -> None:
    """Latency without an end for a few high requests while a long one runs, or a wait that ends before its bound."""

    class Patient(RandomRouter):
        def routes(self, num_layers: int) -> RouteTable:
            high = Route.uniform("high", "high", num_layers, max_wait_steps=route_wait)
            return RouteTable(routes=(high, Route.uniform("low", "low", num_layers)))

    llm = LLM(
        tiny(),
        router=Patient(0.1, 3),
        executors=twin(),
        options=EngineOptions(dispatch="auto", max_wait_steps=max_wait, min_batch=30),
    )
    llm.engine._parts.dispatcher._costs = CHEAP_LOW
    lengths = [140, *[40] * 11]
    for index, (prompt, length) in enumerate(zip(prompts()[:12], lengths, strict=True)):
        llm.engine.add_request(str(index), prompt, greedy(length), stream=False)
    longest = {0: 0, 1: 0}

    def check() -> None:
        for one in llm.engine.scheduler.running:
            route = int(one.requested_N[one.num_computed]) if one.decoding else -1
            if route >= 0:
                longest[route] = max(longest[route], one.waited_steps)

    last = run_all(llm, check)
    assert [len(tokens(last[str(index)])) for index in range(12)] == lengths
    assert longest[0] == (max_wait if route_wait is None else route_wait)
    assert longest[1] <= max_wait
