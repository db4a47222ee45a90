"""Guards sparse attention in the engine: logits are those of a dense run in which sparse tokens see what they may.

T tokens of a sequence, H query heads, G key heads, D head size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.engine.grouped import grouped_router
from tests.engine.retention_cases import short
from tests.engine.tools import (
    ThreeRoutes,
    greedy,
    prompts,
    routed_logits,
    run_all,
    teacher_forced,
    tiny,
    tokens,
    twin,
)
from tests.engine.watched import Watched
from tests.kernels.sparse_cases import chosen_blocks
from tokenrouter import LLM, EngineOptions
from tokenrouter.executors import ExecutorPool, PoolSpec, build_pool
from tokenrouter.executors.full import FullExecutor
from tokenrouter.kvcache.retention import HeavyHitter, RetentionPolicy, RouteClass, SinkWindow
from tokenrouter.routers import AllLowRouter, RandomRouter, Router
from tokenrouter.scheduler.request import NEVER
from tokenrouter.types import Route, RouteTable, SparseAttention

SPEC = SparseAttention(sinks=2, window=6, block=4, top_blocks=2)


SEQUENCES = [p for p in prompts(16) if len(p) > 50][
    :4
]  # longer than the first position that does not see all


class SparseHigh(RandomRouter):
    """Two routes that run high throughout; one of them attends sparsely."""

    name = "sparse_high"

    def routes(self, num_layers: int) -> RouteTable:
        high = Route.uniform("high", "high", num_layers)
        return RouteTable(routes=(high, replace(high, name="sparse", attention="sparse")))


ROUTERS: dict[str, Callable[[], Router]] = {
    "all_low": AllLowRouter,
    "random": lambda: RandomRouter(0.5, seed=3),
    "three routes": ThreeRoutes,
    "layer groups": grouped_router,
    "sparse and high": lambda: SparseHigh(0.5, seed=1),
}


def sparse_twin(spec: SparseAttention | None = SPEC) -> ExecutorPool:
    return replace(twin(), low_attention=spec)


def seen_by(
    routes: Sequence[Route], evicted_at: Sequence[int]
) -> Callable[[int, Tensor, Tensor], Tensor]:
    """What each query sees: all, or by a loop over the blocks of its past. ``evicted_at`` may be short: NEVER."""
    ends = [*evicted_at, *[NEVER] * (len(routes) - len(evicted_at))]

    def seen(layer: int, q_THD: Tensor, k_TGD: Tensor) -> Tensor:
        num_tokens, num_heads, _ = q_THD.shape
        repeat = num_heads // k_TGD.shape[1]
        seen_HTT = torch.zeros(num_heads, num_tokens, num_tokens, dtype=torch.bool)
        for query, route in enumerate(routes):
            kept = [k for k in range(query + 1) if query < ends[k]]
            for group in range(k_TGD.shape[1]):
                heads, chosen = slice(group * repeat, (group + 1) * repeat), kept
                if route.attention == "sparse" or route.executor_at(layer) == "low":
                    start = SPEC.window_start(query)
                    q_RD, key_KD = q_THD[query, heads], k_TGD[kept, group]
                    best = chosen_blocks(SPEC, query, kept, q_RD, key_KD)
                    chosen = [
                        k for k in kept if k < SPEC.sinks or k >= start or k // SPEC.block in best
                    ]
                seen_HTT[heads, query, chosen] = True
        return seen_HTT

    return seen


@cache
def expected_logits(
    ids: tuple[int, ...], routes: tuple[Route, ...], evicted_at: tuple[int, ...] = ()
) -> Tensor:
    return routed_logits(
        ids,
        lambda t, layer: routes[t].executor_at(layer),
        lambda t: "high",
        seen_of=seen_by(routes, evicted_at),
    )


@pytest.mark.parametrize("router", ROUTERS)
def test_logits_are_those_of_the_recorded_routes(router: str) -> None:
    """Sparse in a layer that runs high, a choice that changes with the chunk or the batch, mean keys of a row's last
    request: chunks of several sizes, decode, preemption, few rows for many requests."""
    sequences = SEQUENCES
    for prompt_len, options in (
        (10_000, EngineOptions(dispatch="mixed", max_num_batched_tokens=48)),
        (10_000, EngineOptions(dispatch="mixed", max_num_batched_tokens=512)),
        (2, EngineOptions(dispatch="queued", min_batch=3, max_num_seqs=3)),
        (20, EngineOptions(dispatch="mixed", num_kv_slots=120, max_num_batched_tokens=40)),
    ):
        llm = LLM(tiny(), router=ROUTERS[router](), executors=sparse_twin(), options=options)
        logits, route_lists = teacher_forced(llm, sequences, prompt_len)
        assert options.num_kv_slots is None or llm.engine.stats.num_preemptions > 0
        table = llm.router.routes(tiny().config.num_layers)
        for ids, got_TV, taken in zip(sequences, logits, route_lists, strict=True):
            expected_TV = expected_logits(ids, tuple(table.routes[route] for route in taken))
            start = 0 if prompt_len >= len(ids) else prompt_len - 1
            assert_close(got_TV[start:], expected_TV[start:], rtol=0, atol=3e-4)


def test_the_choice_shows() -> None:
    """Guards the guard: where sparse and full attention give the same logits nothing above would fail."""
    ids = prompts()[2]
    low = Route.uniform("low", "low", tiny().config.num_layers)
    full_TV = routed_logits(ids, lambda t, layer: "low", lambda t: "high")
    sparse_TV = expected_logits(ids, (low,) * len(ids))
    first = SPEC.first_limited
    assert_close(full_TV[:first], sparse_TV[:first])
    assert (full_TV - sparse_TV)[first:].abs().amax(-1).median() > 0.05


@pytest.mark.parametrize(
    "policy",
    [
        SinkWindow(evicted_frac=0.4),
        HeavyHitter(evicted_frac=0.4, recent_frac=0.25),
        RouteClass(evicted_frac=0.3),
    ],
    ids=lambda policy: policy.name,
)
def test_evicted_entries_leave_their_blocks(policy: RetentionPolicy) -> None:
    """Mean keys of before an eviction; blocks counted by entries instead of positions."""
    llm = LLM(
        tiny(),
        router=RandomRouter(0.4, seed=2),
        executors=sparse_twin(),
        options=EngineOptions(max_num_batched_tokens=64, retention=short(policy), max_num_seqs=4),
    )
    watched, table = Watched(llm), llm.router.routes(tiny().config.num_layers)
    cases = {str(i): (p, prompts(seed=5)[i][:40]) for i, p in enumerate(SEQUENCES)}
    taken = watched.serve(cases, wants_all_logits=True)
    evicted = 0
    for name, (prompt, forced) in cases.items():
        ids, evicted_at = (*prompt, *forced), tuple(watched.evicted_at(name))
        evicted += sum(at != NEVER for at in evicted_at)
        on = tuple(table.routes[route] for route in taken[name].outputs[0].routes)
        assert_close(
            watched.logits_of(name), expected_logits(ids, on, evicted_at), rtol=1e-3, atol=5e-4
        )
    assert evicted > 100


def test_a_shared_prefix_brings_no_mean_keys() -> None:
    """A row that adopts a prefix took the mean keys of whoever had the row before."""
    common = list(prompts()[2])[:60]
    asked = [[*common, *prompts(seed=7)[i][:20]] for i in range(3, 9)]
    options = {False: EngineOptions(max_num_seqs=2)}
    options[True] = replace(options[False], prefix_sharing=True, prefix_block=4)
    outputs = {}
    for sharing in (False, True):
        llm = LLM(tiny(), router="all_low", executors=sparse_twin(), options=options[sharing])
        outputs[sharing] = [tokens(out) for out in llm.generate(asked, greedy())]
    assert outputs[True] == outputs[False]
    assert llm.engine.stats.shared_tokens > 100


@pytest.mark.parametrize("form", ["auto", "int8"])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_swapped_entries_and_entries_in_int8(backend: str, form: str) -> None:
    """Mean keys of entries that came back from the host, or that were rounded: as without a swap or a small pool."""
    sequences = [list(p) for p in prompts(16)[2:9]]
    pool = build_pool(
        PoolSpec(high=FullExecutor, low=FullExecutor, low_attention=SPEC), tiny(), kernels=backend
    )
    wide: dict[str, Any] = {"kv_cache_dtype": form}
    small = wide | {"num_kv_slots": 120, "num_host_slots": 4000, "max_num_batched_tokens": 40}
    logits = []
    for options in (wide, small):
        llm = LLM(tiny(), router="all_low", executors=pool, options=EngineOptions(**options))
        logits.append(teacher_forced(llm, sequences, 30)[0])
    assert llm.engine.stats.num_preemptions > 0
    for one_TV, other_TV in zip(*logits, strict=True):
        difference_TV = (one_TV - other_TV).nan_to_num(0.0).abs()
        assert torch.equal(one_TV.isnan(), other_TV.isnan())
        # A last bit that depends on the chunk may flip the rounding of an entry, rarely.
        assert difference_TV.max() < (3e-4 if form == "auto" else 2e-2)
        assert difference_TV.mean() < 5e-4


def test_a_pool_without_sparse_attention_runs_the_route_high() -> None:
    """A route that asks for it ran with full attention on its own executor, under its own name."""
    llm = LLM(tiny(), router=SparseHigh(0.5), executors=twin())
    llm.engine.add_request("0", list(prompts()[5]), greedy(3))
    assert set(run_all(llm)["0"].outputs[0].routes) <= {0, -1}


def test_what_never_limits_is_said_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    """A table's row of sparse attention that was full attention."""
    LLM(tiny(), router="all_low", executors=sparse_twin(replace(SPEC, window=1 << 20)))
    assert "executor.low_attention has no effect" in caplog.text
    caplog.clear()
    LLM(tiny(), router="all_low", executors=sparse_twin())
    assert "no effect" not in caplog.text


def test_low_attention_without_a_low_path_is_refused() -> None:
    """An option without effect."""
    with pytest.raises(ValueError, match="low_attention has no effect"):
        PoolSpec(low_attention=SPEC)


def test_a_pool_says_how_it_attends() -> None:
    """Two runs that differ in it alone had the same description in their tables."""
    assert "low_attention=2+6+2x4" in sparse_twin().description
    assert "low_attention" not in twin().description
