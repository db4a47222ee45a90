"""Guards which tokens a router is asked about: every N-th of a request, and prompts ahead of their chunks."""

from typing import Any

import pytest
import torch

from tests.engine.tools import greedy, prompts, routes, tiny, tokens, twin
from tokenrouter import LLM, EngineOptions, RequestOutput
from tokenrouter.engine.asking import REPEATED
from tokenrouter.features import sequence_batch
from tokenrouter.routers import (
    BatchedRouter,
    CachedRouter,
    CompositeRouter,
    IntervalRouter,
    RandomRouter,
    Router,
    RuleRouter,
)
from tokenrouter.types import Phase, RouteInput, RoutingDecision

ASKED = prompts()[:12]


class Watched(RandomRouter):
    """Draws, and keeps what it was asked about."""

    sees = Router.sees

    def __init__(self, high_frac: float = 0.5, phases: frozenset[Phase] | None = None) -> None:
        super().__init__(high_frac)
        self.phases = frozenset(Phase) if phases is None else phases
        self.calls: list[RouteInput] = []

    def route(self, inputs: RouteInput) -> RoutingDecision:
        self.calls.append(inputs)
        return super().route(inputs)

    @property
    def positions(self) -> list[int]:
        return [p for inputs in self.calls for p in inputs.positions_T.tolist()]


def engine(router: Router, **options: Any) -> LLM:
    return LLM(tiny(), router=router, executors=twin(), options=EngineOptions(**options))


def own_routes(router: Router, llm: LLM, output: RequestOutput) -> list[int]:
    """The router's answer for every token of a finished request, each by itself."""
    fed = [*output.prompt_token_ids, *tokens(output)][:-1]
    batch = sequence_batch(fed, prompt_len=len(output.prompt_token_ids))
    inputs = router.extractor(llm.token_types).extract(batch)
    return router.route(inputs).route_T.tolist()


@pytest.mark.parametrize("every", [1, 3, 8])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"num_kv_slots": 150, "max_num_batched_tokens": 64},
        {"dispatch": "queued", "min_batch": 4, "max_wait_steps": 2},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_tokens_repeat_the_decision_at_the_last_multiple(
    every: int, options: dict[str, Any]
) -> None:
    """A decision that depends on where a chunk began, on batch mates, or is lost in a preemption."""
    llm = engine(IntervalRouter(RandomRouter(0.5), every), **options)
    for output in llm.generate(ASKED, greedy(20)):
        own = own_routes(RandomRouter(0.5), llm, output)
        assert list(routes(output)[:-1]) == [own[p - p % every] for p in range(len(own))]
    if "num_kv_slots" in options:
        assert llm.engine.stats.num_preemptions > 0, "nothing was preempted: nothing was tested"


def test_the_router_is_asked_about_the_tokens_that_decide_alone() -> None:
    """An interval that saves nothing: every token is asked about, and most answers are thrown away."""
    inner = Watched()
    llm = engine(IntervalRouter(inner, 4), log_decisions=True)
    outputs = llm.generate(ASKED[:3], greedy(21))
    lengths = [len(routes(output)) - 1 for output in outputs]
    assert sorted(inner.positions) == sorted(p for n in lengths for p in range(0, n, 4))
    assert all(len(inputs) for inputs in inner.calls), (
        "a step without a token that decides asks nobody"
    )
    stats, log = llm.engine.stats, llm.engine.decisions
    assert stats.decided_tokens == sum(lengths)
    assert stats.repeated_tokens == sum(lengths) - len(inner.positions)
    assert log is not None
    for block in log.blocks:
        reasons = [log.reasons[reason] for reason in block["reason"]]
        for position, reason, score in zip(block["position"], reasons, block["score"], strict=True):
            assert (reason == REPEATED) == (position % 4 != 0) == (score != score)


@pytest.mark.parametrize("phase", list(Phase))
def test_nothing_is_repeated_across_a_phase_that_is_not_decided(phase: Phase) -> None:
    """The first generated tokens on route 0, because the last multiple was a prompt token that nobody decided."""
    inner = Watched(0.0, frozenset({phase}))
    llm = engine(IntervalRouter(inner, 5))
    prompt = ASKED[2][:23]
    [output] = llm.generate([prompt], greedy(12))
    own, other = (1,) * 23, (0,) * 11
    expected = own + other if phase is Phase.PREFILL else (0,) * 23 + (1,) * 11
    assert routes(output)[:-1] == expected
    asked = [0, 5, 10, 15, 20] if phase is Phase.PREFILL else [23, 24, 25, 30]
    assert inner.positions == asked


def test_shared_prefixes_hand_on_the_decisions_that_are_repeated() -> None:
    """A token behind a shared prefix that repeats a decision which its own request never took."""
    options = {"prefix_sharing": True, "prefix_block": 10, "max_num_seqs": 1}
    llm = engine(IntervalRouter(RandomRouter(0.5), 8), **options)
    prompt = list(ASKED[2])
    first, second = llm.generate([prompt, prompt], greedy(6))
    assert llm.engine.stats.shared_tokens > 0
    assert routes(first) == routes(second)


@pytest.mark.parametrize("chunk", [5, 24, 256])
def test_prompts_are_decided_ahead_in_blocks(chunk: int) -> None:
    """A call of the router per chunk; a token that is asked about twice, or answered as another one."""
    inner = Watched()
    llm = engine(BatchedRouter(inner, batch=32), max_num_batched_tokens=chunk, max_num_seqs=1)
    prompt = list(ASKED[2])
    [output] = llm.generate([prompt], greedy(2))
    assert list(routes(output)[:-1]) == own_routes(RandomRouter(0.5), llm, output)
    assert sorted(inner.positions) == list(range(len(prompt) + 1))
    in_prompt = [len(inputs) for inputs in inner.calls if inputs.phase_T[0] == Phase.PREFILL]
    assert min(in_prompt) >= min(32, len(prompt) % 32)
    assert len(in_prompt) <= -(-len(prompt) // 32)


WRAPPED = {
    "batched": lambda: BatchedRouter(RuleRouter(repeats=2), batch=16),
    "batched, small": lambda: BatchedRouter(RuleRouter(repeats=2), batch=16, capacity=16),
    "exact": lambda: CachedRouter(RuleRouter(repeats=2), key="exact"),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_kept_answers_are_the_inner_routers_own(name: str) -> None:
    """An answer for another request's token, chunk, row or step."""
    for options in ({}, {"max_num_batched_tokens": 9, "max_num_seqs": 4}, {"num_kv_slots": 150}):
        llm = engine(WRAPPED[name](), **options)
        for output in llm.generate(ASKED, greedy(10)):
            own = own_routes(RuleRouter(repeats=2), llm, output)
            assert list(routes(output)[:-1]) == own


def test_a_caches_hits_are_the_engines_numbers() -> None:
    """Counts that go on over passes, hits of a cache that the pass before had filled, and none at all."""
    llm = engine(CachedRouter(RuleRouter(), key="exact"), max_num_seqs=1)
    prompt = list(ASKED[2])
    for _ in range(2):
        llm.engine.stats.reset()
        llm.engine.drop_prefixes()
        llm.generate([prompt, prompt], greedy(1))
        counts = llm.engine.stats.route_cache
        assert counts is not None
        assert (counts.lookups, counts.hits) == (2 * len(prompt), len(prompt))
    assert engine(RuleRouter()).engine.stats.route_cache is None


def test_pairs_run_on_the_executors_of_their_first_part() -> None:
    """A composite whose second part changes what is computed."""
    precision = RandomRouter(0.5)
    llm = engine(
        CompositeRouter(
            precision, RandomRouter(0.5, seed=7), {"high": "normal", "low": "drop_first"}
        )
    )
    plain = engine(precision)
    for one, other in zip(
        llm.generate(ASKED, greedy(8)), plain.generate(ASKED, greedy(8)), strict=True
    ):
        assert [route // 2 for route in routes(one)[:-1]] == list(routes(other)[:-1])
        assert tokens(one) == tokens(other)
    assert torch.tensor(llm.engine.stats.executed_tokens.sum(0)).gt(0).all()
    assert llm.engine.route_table.names == (
        "high+normal",
        "high+drop_first",
        "low+normal",
        "low+drop_first",
    )
