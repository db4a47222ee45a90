"""Guards the routes: decided once, executed as decided, in prefill, decode and recompute alike.

T tokens of a sequence, V vocabulary.
"""

import warnings
from typing import Any

import pytest
from torch import Tensor

from tests.engine.grouped import grouped_router
from tests.engine.tools import (
    ThreeRoutes,
    greedy,
    plain_llm,
    prompts,
    routes,
    tiny,
    tokens,
    twin,
)
from tokenrouter import LLM, EngineOptions
from tokenrouter.executors import build_pool
from tokenrouter.kernels import ReferenceKernels
from tokenrouter.routers import LayerwiseRouter, RandomRouter, RuleRouter
from tokenrouter.types import Phase, RouteInput, RoutingDecision

ROUTERS = {
    "random": lambda: RandomRouter(0.5, seed=3),
    "rule without prompt end": lambda: RuleRouter(5, prompt_end=0),
    "three routes": ThreeRoutes,
}


@pytest.mark.parametrize("router", ROUTERS)
def test_a_token_has_the_same_route_however_it_runs(router: str) -> None:
    """A wrong position or prefix in decode: the same sequence as a prompt, generated, and recomputed."""
    make = ROUTERS[router]
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


def test_a_map_over_two_executors_runs_high_where_there_is_one() -> None:
    """A router without a high route of its own that is refused, or whose tokens are counted as routed."""
    llm = plain_llm(router=LayerwiseRouter(high_layers=[0]))
    expected = plain_llm().generate(prompts()[:5], greedy(6))
    with pytest.warns(UserWarning, match="asks for route 'layerwise'.*run on 'high'") as caught:
        outputs = llm.generate(prompts()[:5], greedy(6))
    assert len(caught) == 1
    assert [tokens(o) for o in outputs] == [tokens(o) for o in expected]
    stats, table = llm.engine.stats, llm.engine.route_table
    assert stats.route_names == table.names == ("layerwise", "high")
    total = stats.prefill_tokens + stats.decode_tokens
    assert stats.requested_tokens.sum(0).tolist() == [total, 0]
    assert stats.executed_tokens.sum(0).tolist() == [0, total]
    assert stats.degraded_tokens.tolist() == [total, 0]
    assert all(set(routes(o)) == {1, -1} for o in outputs), "the executed route, by its index"


def test_a_learned_router_scores_by_the_engines_kernels() -> None:
    """A router that stays on the slow operators, or runs others than ``kernels.backend`` says."""

    class Counting(ReferenceKernels):
        num_tokens = 0

        def router_mlp(self, values_TF: Tensor, *others: Any) -> Tensor:
            self.num_tokens += len(values_TF)
            return super().router_mlp(values_TF, *others)

    kernels = Counting()
    pool = build_pool("int8", tiny(), kernels=kernels)
    llm = LLM(tiny(), router=grouped_router("int8"), executors=pool)
    llm.generate(prompts()[:3], greedy(4))
    assert kernels.num_tokens == llm.engine.stats.decided_tokens > 0


def test_a_router_that_answers_nonsense_is_refused() -> None:
    """A route beyond the table, or fewer answers than tokens, ends as an index error in a kernel."""

    class Beyond(RandomRouter):
        def route(self, inputs: RouteInput) -> RoutingDecision:
            return RoutingDecision.constant(2, len(inputs), "beyond")

    class TooFew(RandomRouter):
        def route(self, inputs: RouteInput) -> RoutingDecision:
            return RoutingDecision.constant(0, len(inputs) - 1, "too few")

    for router, message in (
        (Beyond(), r"route outside 0 \.\. 1"),
        (TooFew(), "decided 4 of 5 tokens"),
    ):
        llm = LLM(tiny(), router=router, executors=twin())
        with pytest.raises(ValueError, match=message):
            llm.generate([[5, 6, 7, 8, 9]], greedy(3))
        assert not llm.engine.has_unfinished()
        assert llm.engine.pool.free == llm.engine.pool.num_slots
