"""Everything that is built before anything is measured: systems, requests, the peer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tokenrouter import LLM, EngineOptions, ObserveOptions
from tokenrouter.evaluation.peers import TransformersPeer
from tokenrouter.evaluation.systems import calibration_passages
from tokenrouter.executors import ExecutorPool, PoolSpec, build_pool
from tokenrouter.executors.int8 import Int8Executor
from tokenrouter.models import LoadedModel
from tokenrouter.routers import Router, RuleRouter
from tokenrouter.routers.budget import Budget
from tokenrouter.workloads import (
    LengthMix,
    PythonDocs,
    RequestSpec,
    calibration_documents,
    evaluation_documents,
)

STATIC_BATCH = 8
OBSERVED_LAYERS, OBSERVED_QUERIES = 4, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is run; ``decode_context`` is the prompts' length where 32 requests decode."""

    prompt_lengths: tuple[int, ...] = (20, 30, 50, 80, 120, 200, 500, 1000) * 2
    output_max: int = 128
    decode_context: int = 512
    decode_steps: int = 24
    window_tokens: int = 2048
    num_windows: int = 3
    copy_bytes: int = 256 << 20


QUICK = Sizes(
    prompt_lengths=(20, 50, 120, 300),
    output_max=16,
    decode_context=64,
    decode_steps=8,
    window_tokens=512,
    num_windows=1,
    copy_bytes=4 << 20,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Systems, requests and the peer.

    Attributes:
        ids: of the evaluation text.
        held_out: ids of the other side of the text, on which thresholds are set.
        high_frac: the routed systems' budget.
        llm: makes one more system, calibrated as the others are.
        systems: what serves the requests: all_high, all_low and routed on the pool int8; shared_high and shared_routed
            on int8_shared.
        observed: all_high with attention statistics: of decode in all layers, and of the last queries of prompts in a
            few.
        head_low: all_low with an int8 lm_head.
        reference_kernels: all_high on the reference backend.
        float32: what KL is measured against.
        peer: transformers in the systems' dtype.
    """

    sizes: Sizes
    repeats: int
    ids: list[int]
    held_out: list[int]
    high_frac: float
    requests: list[RequestSpec]
    pools: Mapping[str, ExecutorPool]
    llm: Callable[[Router | str, ExecutorPool], LLM]
    systems: dict[str, LLM]
    observed: LLM
    head_low: LLM
    reference_kernels: LLM
    float32: LLM
    peer: TransformersPeer


def build(
    model_f32: LoadedModel,
    peer_model: Any,
    sizes: Sizes,
    *,
    repeats: int,
    high_frac: float,
    backend: str = "auto",
    dtype: str = "bfloat16",
) -> Bench:
    """The systems and the peer.

    Args:
        model_f32: the reference of KL; the systems run it in ``dtype``.
        peer_model: transformers' model in ``dtype``.
        sizes: how much is run.
        repeats: turns that count.
        high_frac: the routed systems' budget, 0 to 1.
        backend: of the kernels.
        dtype: of the systems' high path.
    """
    model = model_f32.astype(dtype)
    encode = partial(model.tokenizer.encode, add_special_tokens=False)
    ids, held_out = _both_sides(encode)
    mix = LengthMix(prompt_lengths=sizes.prompt_lengths, output_min=8, output_max=sizes.output_max)
    requests = mix.requests(encode, ids)
    passages = calibration_passages(requests, held_out, seed=0)
    pools = {name: build_pool(name, model, kernels=backend) for name in ("int8", "int8_shared")}
    llm = partial(_llm, model, passages)
    head_low = PoolSpec(low=Int8Executor, lm_head="low")
    return Bench(
        sizes=sizes,
        repeats=repeats,
        ids=ids,
        held_out=held_out,
        high_frac=high_frac,
        requests=requests,
        pools=pools,
        llm=llm,
        systems=_systems(llm, pools, high_frac),
        observed=llm("all_high", pools["int8"], observe=_observed(model.config.num_layers)),
        head_low=llm("all_low", build_pool(head_low, model, kernels=backend)),
        reference_kernels=llm("all_high", build_pool("full", model, kernels="reference")),
        float32=LLM(model_f32, executors=build_pool("full", model_f32, kernels=backend)),
        peer=_peer(peer_model, requests, model.tokenizer),
    )


def _both_sides(encode: Callable[[str], Sequence[int]]) -> tuple[list[int], list[int]]:
    """Ids of the evaluation text, and of the text on which thresholds are set."""
    documents = PythonDocs().documents()
    return (
        list(encode("\n\n".join(evaluation_documents(documents)))),
        list(encode("\n\n".join(calibration_documents(documents)))),
    )


def _llm(
    model: LoadedModel,
    passages: Sequence[Sequence[int]],
    router: Router | str,
    pool: ExecutorPool,
    **options: Any,
) -> LLM:
    return LLM(
        model,
        router=router,
        executors=pool,
        calibration_ids=passages,
        options=EngineOptions(**options),
    )


def _systems(
    llm: Callable[[Router | str, ExecutorPool], LLM],
    pools: Mapping[str, ExecutorPool],
    high_frac: float,
) -> dict[str, LLM]:
    return {
        "all_high": llm("all_high", pools["int8"]),
        "all_low": llm("all_low", pools["int8"]),
        "routed": llm(routed_router(high_frac), pools["int8"]),
        "shared_high": llm("all_high", pools["int8_shared"]),
        "shared_routed": llm(routed_router(high_frac), pools["int8_shared"]),
    }


def _observed(num_layers: int) -> ObserveOptions:
    """Prompts report from ``OBSERVED_LAYERS`` layers, evenly spread from the first to the last."""
    last, gaps = num_layers - 1, OBSERVED_LAYERS - 1
    layers = sorted({round(i * last / gaps) for i in range(OBSERVED_LAYERS)})
    return ObserveOptions(prefill_layers=tuple(layers), prefill_queries=OBSERVED_QUERIES)


def _peer(peer_model: Any, requests: list[RequestSpec], tokenizer: Any) -> TransformersPeer:
    pad_id = getattr(tokenizer, "pad_token_id", None) or 0
    return TransformersPeer(peer_model, requests, batch_size=STATIC_BATCH, pad_id=pad_id)


def routed_router(high_frac: float) -> RuleRouter:
    """The routed systems' router, without thresholds: no two engines share an instance."""
    return RuleRouter(budget=Budget(high_frac=high_frac))
