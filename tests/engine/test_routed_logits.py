"""Guards the numbers behind the routes: logits are those of the recorded routes, whatever runs beside a token.

T tokens of a sequence, V vocabulary.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.engine.grouped import grouped_router
from tests.engine.late import LateRouter
from tests.engine.tools import (
    ThreeRoutes,
    other,
    prompts,
    routed_logits,
    teacher_forced,
    tiny,
    twin,
)
from tokenrouter import LLM, EngineOptions
from tokenrouter.executors import PoolSpec, build_pool
from tokenrouter.executors.full import FullExecutor
from tokenrouter.executors.int8 import Int8Executor
from tokenrouter.models import tiny_random
from tokenrouter.routers import LayerwiseRouter, RandomRouter, RuleRouter
from tokenrouter.routers.layer_groups import LayerGroups
from tokenrouter.types import Route

ROUTERS = {
    "random": lambda: RandomRouter(0.5, seed=3),
    "rule": lambda: RuleRouter(first_positions=3, prompt_end=2, high_types=("punctuation",)),
    "layerwise": lambda: LayerwiseRouter(high_layers=[1, -1]),
    "three routes": ThreeRoutes,
    "after a layer": lambda: LateRouter(after_layer=2),
    "layer groups": grouped_router,
    "layer groups after a layer": lambda: grouped_router(
        groups=LayerGroups(((2, 3), (1,)), (0.5, -1.0))
    ),
}
every_router = pytest.mark.parametrize("router", ROUTERS)


def executor_at(route: Route, layer: int) -> str:
    return next(span.executor for span in route.spans if span.start <= layer < span.stop)


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
            on = [table.routes[route] for route in taken]
            expected_TV = routed_logits(
                ids,
                lambda t, layer, on=on: executor_at(on[t], layer),
                lambda t, on=on: _head(on[t], lm_head),
            )
            start = 0 if prompt_len >= len(ids) else prompt_len - 1
            assert got_TV[:start].isnan().all()
            assert_close(got_TV[start:], expected_TV[start:], rtol=0, atol=2e-4)


@pytest.mark.parametrize("prompt_len", [10_000, 2])
def test_tokens_take_many_routes_of_a_router_with_groups(prompt_len: int) -> None:
    """Guards the guard: a router whose tokens all go one way would show no mixed route."""
    llm = LLM(tiny(), router=grouped_router(), executors=twin())
    _, route_lists = teacher_forced(llm, [list(p) for p in prompts()[:7]], prompt_len)
    assert len({route for taken in route_lists for route in taken}) >= 4


def _head(route: Route, lm_head: str) -> str:
    """A low token's head is low when the pool says so; of a mixed route the path of most layers counts."""
    if lm_head == "high":
        return "high"
    layers: dict[str, int] = {}
    for span in route.spans:
        layers[span.executor] = layers.get(span.executor, 0) + span.stop - span.start
    return max(layers, key=lambda path: (layers[path], path != "high"))  # equal: the low path


def test_the_twin_paths_differ() -> None:
    """Guards the guard: with equal paths a wrong route would not show."""
    ids = list(prompts()[5])
    high = routed_logits(ids, lambda t, layer: "high", lambda t: "high")
    low = routed_logits(ids, lambda t, layer: "low", lambda t: "high")
    one = routed_logits(ids, lambda t, layer: "low" if t == 1 else "high", lambda t: "high")
    assert (high - low).abs().mean() > 1
    assert (high - one)[1:].abs().amax(-1).min() > 1e-2, "one token's path must show in all later"
    assert other().config == tiny().config


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {}), ("qwen3", {"attention_bias": True}), ("mistral", {"sliding_window": 9})],
)
def test_half_precision_runs_everywhere(dtype: str, family: str, options: dict[str, Any]) -> None:
    """An operator that refuses or widens another dtype: in a mask, a head norm, a bias, a scale, the arena."""
    full = tiny_random(family, **options)
    asked = [list(p) for p in prompts()[:8]]
    logits = {}
    for model in (full, full.astype(dtype)):
        for prompt_len in (10_000, 2):
            llm = LLM(
                model,
                router=RandomRouter(0.5),
                executors="int8",
                options=EngineOptions(dispatch="queued", min_batch=3, max_num_batched_tokens=48),
            )
            parts, _ = teacher_forced(llm, asked, prompt_len)
            logits[model.dtype, prompt_len] = torch.cat([p[1:] for p in parts])
            assert llm.engine._parts.arena.kv_LSPD.dtype == model.dtype
    for (model_dtype, prompt_len), got in logits.items():
        assert got.isfinite().all() and got.dtype == torch.float32
        expected = logits[torch.float32, prompt_len]
        if model_dtype != torch.float32:
            assert torch.cosine_similarity(got, expected, dim=-1).mean() > 0.98
