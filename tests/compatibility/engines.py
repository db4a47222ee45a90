"""The model and the engines that the pairs run on, by dotted options."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from tests.engine.tools import SMALL
from tokenrouter import LLM, EngineOptions
from tokenrouter.executors import ExecutorPool, build_pool
from tokenrouter.executors.pool import POOLS
from tokenrouter.kvcache.retention import Full, HeavyHitter, RetentionOptions
from tokenrouter.models import LoadedModel
from tokenrouter.models.loader import from_hf_model
from tokenrouter.models.tiny import ByteTokenizer, tiny_hf
from tokenrouter.routers import RandomRouter, Router
from tokenrouter.types import Retention, RouteTable

PROMPT_LENS = (26, 21, 17)
OUTPUT_LEN = 14
SHARED_LEN = 16
TOGETHER = {"max_num_seqs": 6, "max_num_batched_tokens": 32, "dispatch": "mixed"}
ONE_BY_ONE = {"max_num_seqs": 1, "max_num_batched_tokens": 256, "dispatch": "mixed"}
RETENTION = {"policy": Full(), "interval": 8, "window": 4, "layers": 2, "sinks": 2, "recent": 3}
TWO_PATHS = {"pool": "int8", "router": lambda: RandomRouter(0.5, seed=1)}
"""Where a setting needs two paths and says nothing else: half of the tokens go low."""
EVICTS = {"retention.policy": HeavyHitter(evicted_frac=0.3)}
"""Where a setting needs evictions and names no policy."""
PARAMS = {"temperature": 0.0, "max_tokens": OUTPUT_LEN, "ignore_eos": True}


@cache
def hf_model() -> Any:
    """Two layers of random weights, as transformers runs them."""
    return tiny_hf("llama", **SMALL)


@cache
def model() -> LoadedModel:
    """The same in float32, as the engine runs it."""
    return from_hf_model(hf_model(), ByteTokenizer(), name="tiny", max_model_len=256)


@cache
def pool(name: str, lm_head: str, kernels: str) -> ExecutorPool:
    """Executors, built once for all tests."""
    return build_pool(replace(POOLS[name], lm_head=lm_head), model(), kernels=kernels)


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Random ids that begin alike, and behind each prompt the ids that may be forced after it."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, 384, (n + OUTPUT_LEN,), generator=generator) for n in PROMPT_LENS]
    return tuple((*ids[0][:SHARED_LEN].tolist(), *own[SHARED_LEN:].tolist()) for own in ids)


def group(options: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The options under ``prefix``, without it."""
    return {
        name.removeprefix(f"{prefix}."): value
        for name, value in options.items()
        if name.startswith(f"{prefix}.")
    }


def make_router(options: Mapping[str, Any]) -> Router | str:
    """The router that is asked for, else all high."""
    make, around = options.get("router"), options.get("router.around")
    if make is None:
        return "all_high"
    router: Router = make() if around is None else around(make())
    if "router.low_class" in options:
        name_class(router, options["router.low_class"])
    return router


def name_class(router: Router, retention: Retention) -> None:
    """Gives all routes but ``high`` a retention class, in the router's own table."""
    routes = router.routes

    def classed(num_layers: int) -> RouteTable:
        table = routes(num_layers)
        return replace(
            table,
            routes=tuple(
                route if route.name == "high" else replace(route, retention=retention)
                for route in table.routes
            ),
        )

    router.routes = classed  # type: ignore[method-assign]


def make_llm(options: Mapping[str, Any], *, together: bool) -> LLM:
    """An engine with all options but those of a request."""
    engine = {**(TOGETHER if together else ONE_BY_ONE), **group(options, "engine")}
    if retention := group(options, "retention"):
        engine["retention"] = RetentionOptions(**{**RETENTION, **retention})
    executors = pool(
        options.get("pool", "full"),
        options.get("pool.lm_head", "high"),
        options.get("kernels", "auto"),
    )
    llm = LLM(
        model(),
        router=make_router(options),
        executors=executors,
        options=EngineOptions(**engine),
        calibration_ids=[ids[:n] for ids, n in zip(prompts(), PROMPT_LENS, strict=True)],
    )
    if llm.engine.scheduler.host is not None:
        # A tiny model is computed again faster than anything is copied.
        llm.engine.scheduler.host._recompute_s = float("inf")
    return llm
