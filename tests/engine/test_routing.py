"""Guards the routes: decided once, executed as decided, in prefill, decode and recompute alike.

T tokens of a sequence, V vocabulary.
"""

import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.engine.tools import (
    greedy,
    other,
    plain_llm,
    prompts,
    routed_logits,
    routes,
    run_all,
    tiny,
    tokens,
    twin,
)
from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.executors import PoolSpec, build_pool
from tokenrouter.executors.full import FullExecutor
from tokenrouter.executors.int8 import Int8Executor
from tokenrouter.routers import LayerwiseRouter, RandomRouter, Router, RuleRouter
from tokenrouter.types import (
    LayerSpan,
    Phase,
    Route,
    RouteInput,
    RouteTable,
    RoutingDecision,
)


class ThreeRoutes(Router):
    """Three routes by token id, two of them change the executor between layers."""

    name = "three_routes"

    @property
    def options(self) -> dict[str, object]:
        return {}

    def routes(self, num_layers: int) -> RouteTable:
        low_first = (LayerSpan(0, 1, "low"), LayerSpan(1, 3, "high"), LayerSpan(3, 4, "low"))
        high_first = (LayerSpan(0, 2, "high"), LayerSpan(2, num_layers, "low"))
        return RouteTable(
            routes=(
                Route.uniform("high", "high", num_layers),
                Route(name="low_first", spans=low_first),
                Route(name="high_first", spans=high_first),
            )
        )

    def route(self, inputs: RouteInput) -> RoutingDecision:
        route_T = inputs.ids_T % 3
        return RoutingDecision(
            route_T=route_T,
            score_T=torch.full(route_T.shape, float("nan")),
            reason_T=torch.zeros_like(route_T),
            reasons=("id modulo three",),
        )


ROUTERS = {
    "random": lambda: RandomRouter(0.5, seed=3),
    "rule": lambda: RuleRouter(first_positions=3, prompt_end=2, high_types=("punctuation",)),
    "layerwise": lambda: LayerwiseRouter(high_layers=[1, -1]),
    "three routes": ThreeRoutes,
}
every_router = pytest.mark.parametrize("router", ROUTERS)


def executor_at(route: Route, layer: int) -> str:
    return next(span.executor for span in route.spans if span.start <= layer < span.stop)


def teacher_forced(
    llm: LLM, sequences: Sequence[Sequence[int]], prompt_len: int
) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """Logits [T, V] (from the prompt's last token on; all when everything is prompt) and routes per sequence."""
    shape = len(sequences), tiny().config.vocab_size
    got = [torch.full((len(ids), shape[1]), float("nan")) for ids in sequences]

    def make_sink(index: int):  # type: ignore[no-untyped-def]
        def sink(start: int, logits_TV: Tensor) -> None:
            got[index][start : start + len(logits_TV)] = logits_TV

        return sink

    for index, ids in enumerate(sequences):
        split = min(prompt_len, len(ids))
        llm.engine.add_request(
            str(index),
            ids[:split],
            SamplingParams(temperature=0),
            forced_ids=ids[split:],
            logits_sink=make_sink(index),
            wants_all_logits=split == len(ids),
            stream=False,
        )
    last = run_all(llm)
    return got, [routes(last[str(index)]) for index in range(len(sequences))]


@every_router
@pytest.mark.parametrize("lm_head", ["high", "low"])
def test_logits_are_those_of_the_recorded_routes(router: str, lm_head: str) -> None:
    """A slice run by the wrong executor, rows not sorted back, a head of the wrong path: against a dense forward
    in which every token takes its recorded path alone."""
    sequences = [list(p) for p in prompts()[:7]]
    results = []
    for prompt_len, options in (
        (10_000, EngineOptions(dispatch="mixed", max_num_batched_tokens=48)),
        (10_000, EngineOptions(dispatch="mixed", max_num_batched_tokens=512)),
        (2, EngineOptions(dispatch="queued", min_batch=3)),
        (2, EngineOptions(dispatch="mixed", num_kv_slots=120, max_num_batched_tokens=40)),
    ):
        llm = LLM(tiny(), router=ROUTERS[router](), executors=twin(lm_head), options=options)
        results.append((llm, *teacher_forced(llm, sequences, prompt_len), prompt_len))
    assert results[-1][0].engine.stats.num_preemptions > 0
    for llm, logits, route_lists, prompt_len in results:
        table = llm.router.routes(tiny().config.num_layers)
        for ids, got_TV, taken in zip(sequences, logits, route_lists, strict=True):
            assert len(taken) == len(ids) and min(taken) >= 0
            expected_TV = routed_logits(
                ids,
                lambda t, layer, taken=taken: executor_at(table.routes[taken[t]], layer),
                lambda t, taken=taken: _head(table.routes[taken[t]], lm_head),
            )
            start = 0 if prompt_len >= len(ids) else prompt_len - 1
            assert got_TV[:start].isnan().all()
            assert_close(got_TV[start:], expected_TV[start:], rtol=0, atol=2e-4)


def _head(route: Route, lm_head: str) -> str:
    """A low token's head is low when the pool says so; of a mixed route the path of most layers counts."""
    if lm_head == "high":
        return "high"
    layers: dict[str, int] = {}
    for span in route.spans:
        layers[span.executor] = layers.get(span.executor, 0) + span.stop - span.start
    return max(layers, key=lambda path: layers[path])  # equal: the path of the first layer


def test_the_twin_paths_differ() -> None:
    """Guards the guard: with equal paths a wrong route would not show."""
    ids = list(prompts()[5])
    high = routed_logits(ids, lambda t, layer: "high", lambda t: "high")
    low = routed_logits(ids, lambda t, layer: "low", lambda t: "high")
    one = routed_logits(ids, lambda t, layer: "low" if t == 1 else "high", lambda t: "high")
    assert (high - low).abs().mean() > 1
    assert (high - one)[1:].abs().amax(-1).min() > 1e-2, "one token's path must show in all later"
    assert other().config == tiny().config


@pytest.mark.parametrize("router", ["random", "rule without prompt end", "three routes"])
def test_a_token_has_the_same_route_however_it_runs(router: str) -> None:
    """A wrong position or prefix in decode: the same sequence as a prompt, generated, and recomputed."""
    make = {**ROUTERS, "rule without prompt end": lambda: RuleRouter(5, prompt_end=0)}[router]
    asked = prompts()[:12]

    def engine(**options: object) -> LLM:
        return LLM(tiny(), router=make(), executors=twin(), options=EngineOptions(**options))  # type: ignore[arg-type]

    generated = engine().generate(asked, greedy(40))
    whole = [[*p, *tokens(o)] for p, o in zip(asked, generated, strict=True)]
    as_prompts = engine().generate(whole, greedy(1))
    for one, other_way in zip(generated, as_prompts, strict=True):
        assert routes(one)[-1] == routes(other_way)[-1] == -1, "the last token is never fed"
        assert routes(one)[:-1] == routes(other_way)[:-2]
    for chunk in (3, 17):
        small = engine(max_num_seqs=3, max_num_batched_tokens=chunk).generate(whole, greedy(1))
        assert [routes(o) for o in small] == [routes(o) for o in as_prompts]
    tight = engine(num_kv_slots=150, max_num_batched_tokens=64)
    recomputed = tight.generate(asked, greedy(40))
    assert tight.engine.stats.num_preemptions > 0
    for one, again in zip(generated, recomputed, strict=True):
        if tokens(one) == tokens(again):
            assert routes(one) == routes(again)
    assert sum(tokens(o) == tokens(a) for o, a in zip(generated, recomputed, strict=True)) > 8


def test_every_token_is_decided_once() -> None:
    """A recompute that asks the router again, or counts that miss or double tokens."""
    asked = prompts()[:20]
    llm = LLM(
        tiny(),
        router=RandomRouter(0.5),
        executors=twin(),
        options=EngineOptions(
            num_kv_slots=130, max_num_batched_tokens=64, log_decisions=True, dispatch="queued"
        ),
    )
    outputs = llm.generate(asked, greedy(12))
    stats = llm.engine.stats
    num_fed = sum(len(p) + 11 for p in asked)
    assert stats.num_preemptions > 0
    assert stats.decided_tokens == num_fed
    assert stats.reused_tokens == stats.prefill_tokens + stats.decode_tokens - num_fed > 0
    assert stats.executed_tokens.sum() == stats.prefill_tokens + stats.decode_tokens
    assert stats.output_tokens == 12 * len(asked)
    assert (stats.executed_tokens == stats.requested_tokens).all()
    log = llm.engine.decisions
    assert log is not None
    seen = [
        (log.request_ids[request], position, executed, phase)
        for block in log.blocks
        for request, position, executed, phase in zip(
            *(block[c] for c in ("request_index", "position", "executed", "phase")), strict=True
        )
    ]
    assert len({one[:2] for one in seen}) == len(seen) == num_fed
    by_id = {output.request_id: output for output in outputs}
    for request_id, position, executed, phase in seen:
        output = by_id[request_id]
        assert routes(output)[position] == executed
        assert (phase == Phase.DECODE) == (position >= len(output.prompt_token_ids))


def test_request_level_takes_one_route_for_all() -> None:
    """The rollback mode: generated tokens routed by themselves, or the last token counted as fed."""
    llm = LLM(
        tiny(),
        router="request_level",
        executors=twin(),
        calibration_ids=[list(p) for p in prompts() if len(p) > 5],
    )
    outputs = llm.generate(prompts()[:30], greedy(6))
    taken = [set(routes(output)[:-1]) for output in outputs]
    assert all(len(one) == 1 for one in taken)
    assert {0} in taken and {1} in taken
    assert all(routes(output)[-1] == -1 for output in outputs)


def test_a_pool_without_low_runs_high_with_one_warning() -> None:
    """A silent downgrade of the experiment, a warning per step, or a wrong count."""
    llm = plain_llm(router="all_low")
    expected = plain_llm().generate(prompts()[:5], greedy(6))
    with pytest.warns(UserWarning, match="asks for route 'low'.*run on 'high'") as caught:
        outputs = llm.generate(prompts()[:5], greedy(6))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.generate(prompts()[:5], greedy(6))
    assert [tokens(o) for o in outputs] == [tokens(o) for o in expected]
    assert all(set(routes(o)) == {0, -1} for o in outputs)
    stats = llm.engine.stats
    total = stats.prefill_tokens + stats.decode_tokens
    assert stats.degraded_tokens.tolist() == [0, total]
    assert stats.executed_tokens.sum(0).tolist() == [total, 0]
    assert stats.requested_tokens.sum(0).tolist() == [0, total]


def test_a_router_that_the_pool_cannot_run_is_refused() -> None:
    """A fixed map over two executors has no fallback among its routes."""
    with pytest.raises(ValueError, match=r"needs executors \['high', 'low'\]; the pool has \['high'\]"):
        plain_llm(router=LayerwiseRouter(high_layers=[0]))


def test_a_router_that_answers_nonsense_is_refused() -> None:
    """A route beyond the table, or fewer answers than tokens, ends as an index error in a kernel."""

    class Beyond(RandomRouter):
        def route(self, inputs: RouteInput) -> RoutingDecision:
            return RoutingDecision.constant(2, len(inputs), "beyond")

    class TooFew(RandomRouter):
        def route(self, inputs: RouteInput) -> RoutingDecision:
            return RoutingDecision.constant(0, len(inputs) - 1, "too few")

    for router, message in ((Beyond(), r"route outside 0 \.\. 1"), (TooFew(), "decided 4 of 5 tokens")):
        llm = LLM(tiny(), router=router, executors=twin())
        with pytest.raises(ValueError, match=message):
            llm.generate([[5, 6, 7, 8, 9]], greedy(3))
        assert not llm.engine.has_unfinished()
        assert llm.engine.pool.free == llm.engine.pool.num_slots


class DecodeOnly(RandomRouter):
    """Decides generated tokens only."""

    phases = frozenset({Phase.DECODE})


def test_phases_that_a_router_does_not_decide_take_the_first_route() -> None:
    """A decode-only router whose answer for prompt tokens is used all the same."""
    llm = LLM(tiny(), router=DecodeOnly(0.0), executors=twin())
    for prompt, output in zip(prompts()[:5], llm.generate(prompts()[:5], greedy(5)), strict=True):
        assert routes(output) == (0,) * len(prompt) + (1,) * 4 + (-1,)


def test_int8_company_changes_little_and_the_path_much() -> None:
    """A token's low result that depends on its batch mates: differences of the size of int8's own error."""
    asked = [list(p) for p in prompts()[:16]]

    def logits(executors: object, router: str, **options: object) -> Tensor:
        llm = LLM(
            tiny(),
            router=router,
            executors=executors,  # type: ignore[arg-type]
            options=EngineOptions(**options),  # type: ignore[arg-type]
        )
        return torch.cat(teacher_forced(llm, asked, 10_000)[0])

    pool = build_pool("int8", tiny())
    together = logits(pool, "all_low", max_num_batched_tokens=1024)
    alone = logits(pool, "all_low", max_num_seqs=1, max_num_batched_tokens=200)
    high = logits(pool, "all_high")
    own_error = (together - high).abs().mean()
    assert own_error > 1e-2
    assert (together - alone).abs().mean() < 0.02 * own_error


def test_lm_head_low_changes_the_head_of_low_tokens_only() -> None:
    """An option without effect, or one that also moves the high tokens to the low head."""
    asked = [list(p) for p in prompts()[:4]]
    logits = {}
    for lm_head in ("high", "low"):
        pool = build_pool(PoolSpec(high=FullExecutor, low=Int8Executor, lm_head=lm_head), tiny())  # type: ignore[arg-type]
        for router in ("all_high", "all_low"):
            llm = LLM(tiny(), router=router, executors=pool)
            logits[lm_head, router] = torch.cat(teacher_forced(llm, asked, 10_000)[0])
    assert torch.equal(logits["high", "all_high"], logits["low", "all_high"])
    difference = (logits["high", "all_low"] - logits["low", "all_low"]).abs()
    assert 1e-4 < difference.mean() < 0.5
