"""What the engine's tests share: a tiny model, a pool of two float32 paths, and a dense oracle of routing.

T tokens of a sequence, H query heads, G key heads, D head size, E hidden size, V vocabulary.

``twin``: two float32 executors of different weights. Unlike int8, where a last-bit difference of an input may flip a
rounding, both paths are continuous: a wrong route, slice or row shows, and batch company does not.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenrouter import LLM, EngineOptions, RequestOutput, SamplingParams
from tokenrouter.executors import ExecutorPool
from tokenrouter.executors.full import FullExecutor
from tokenrouter.executors.packing import PackedModel
from tokenrouter.kernels import select
from tokenrouter.models import LoadedModel
from tokenrouter.models.loader import from_hf_model
from tokenrouter.models.tiny import ByteTokenizer, tiny_hf
from tokenrouter.routers import Router
from tokenrouter.types import LayerSpan, Route, RouteInput, RouteTable, RoutingDecision

NEAR_TIE = 1e-3
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@cache
def tiny_pair(family: str = "llama", max_model_len: int | None = None) -> tuple[LoadedModel, Any]:
    """The tiny model in float32, and as transformers runs it."""
    hf_model = tiny_hf(family)
    model = from_hf_model(hf_model, ByteTokenizer(), name="tiny", max_model_len=max_model_len)
    return model, hf_model


def tiny(family: str = "llama", max_model_len: int | None = None) -> LoadedModel:
    """The tiny model in float32."""
    return tiny_pair(family, max_model_len)[0]


@cache
def other() -> LoadedModel:
    """A model of the same shape with other weights: the twin pool's low path."""
    return from_hf_model(tiny_hf("llama", seed=1), ByteTokenizer(), name="other")


@cache
def twin(lm_head: str = "high") -> ExecutorPool:
    """Two float32 paths that compute visibly different things."""
    kernels = select()
    executors = {
        "high": FullExecutor(PackedModel(tiny(), kernels)),
        "low": FullExecutor(PackedModel(other(), kernels)),
    }
    return ExecutorPool(executors=executors, lm_head=lm_head, kernels=kernels)  # type: ignore[arg-type]


def greedy(max_tokens: int | None = 12, **options: Any) -> SamplingParams:
    """Greedy, to the full length."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


@cache
def prompts(count: int = 64, longest: int = 90, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Random ids of uneven lengths; the first has one token, the second two."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    lengths[:3] = [1, 2, longest]
    return tuple(
        tuple(torch.randint(3, 384, (n,), generator=generator).tolist()) for n in lengths[:count]
    )


def tokens(output: RequestOutput) -> tuple[int, ...]:
    """Ids of a request's only completion."""
    assert output.error is None, output.error
    assert output.finished and len(output.outputs) == 1
    return output.outputs[0].token_ids


def routes(output: RequestOutput) -> tuple[int, ...]:
    """Executed routes of a request's only completion."""
    return output.outputs[0].routes


def run_all(llm: LLM, check: Callable[[], None] | None = None) -> dict[str, RequestOutput]:
    """Steps to the end; the last output of every request, and the pool sound after every step."""
    last: dict[str, RequestOutput] = {}
    steps = 0
    while llm.engine.has_unfinished():
        steps += 1
        assert steps < 5000, "the engine does not finish"
        for output in llm.engine.step():
            last[output.request_id] = output
        llm.engine.pool.check_integrity()
        if check is not None:
            check()
    assert llm.engine.pool.available == llm.engine.pool.num_slots, "slots leaked"
    return last


class NearTies:
    """Compares greedy outputs; a difference is excused where the two best logits are nearly equal."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.count = 0

    def same(self, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int]) -> None:
        """Asserts that ``got`` is ``expected`` up to the first near-tie."""
        assert len(got) == len(expected)
        wrong = next(
            (i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b), None
        )
        if wrong is None:
            return
        gap = self.gap([*prompt, *expected[:wrong]])
        assert gap < NEAR_TIE, f"token {wrong}: {got[wrong]} for {expected[wrong]}, gap {gap:.4f}"
        self.count += 1

    def gap(self, ids: Sequence[int]) -> float:
        """Difference of the two best logits after ``ids``."""
        found: list[Tensor] = []
        self._llm.score([list(ids)], sink=lambda _, __, x_TV: found.append(x_TV[-1].clone()))
        best = found[-1].topk(2).values
        return float(best[0] - best[1])


def plain_llm(options: EngineOptions | None = None, **kwargs: Any) -> LLM:
    """The tiny model with all defaults but the given."""
    return LLM(tiny(), options=options or EngineOptions(), **kwargs)


@cache
def alone(max_tokens: int = 12) -> tuple[tuple[int, ...], ...]:
    """Greedy output of every prompt of ``prompts()``, one request at a time: what all others must equal."""
    llm = plain_llm(EngineOptions(max_num_seqs=1, max_num_batched_tokens=256))
    return tuple(tokens(llm.generate([p], greedy(max_tokens))[0]) for p in prompts())


def routed_logits(
    ids: Sequence[int],
    executor_of: Callable[[int, int], str],
    head_of: Callable[[int], str],
    mask_of: Callable[[int], Tensor] | None = None,
    *,
    seen_of: Callable[[int, Tensor, Tensor], Tensor] | None = None,
    entries_are_int8: bool = False,
) -> Tensor:
    """Dense forward of one sequence in which each token takes its own path through the twin models.

    Args:
        ids: T tokens.
        executor_of: path of (position, layer).
        head_of: path whose final norm and lm_head a position uses.
        mask_of: bool [T, T] of a layer, which query sees which key; None: all that are not later.
        seen_of: instead of it bool [H, T, T] of a layer, its queries [T, H, D] and keys [T, G, D].
        entries_are_int8: keys and values are rounded as the int8 cache rounds them.

    Returns:
        Logits [T, V].
    """
    models, config = {"high": tiny(), "low": other()}, tiny().config
    num_tokens, kv_heads = len(ids), config.num_kv_heads
    causal_TT = torch.ones(num_tokens, num_tokens).tril().bool()
    split = (config.num_heads, kv_heads, kv_heads)
    hidden_TE = tiny().weights.embed_VE[torch.tensor(list(ids))]

    def pick(layer: int, by_path: dict[str, Tensor]) -> Tensor:
        return torch.stack([by_path[executor_of(t, layer)][t] for t in range(num_tokens)])

    for layer in range(config.num_layers):
        at = {path: model.weights.layers[layer] for path, model in models.items()}
        qkv_TO = pick(
            layer, {p: _norm(hidden_TE, w.input_norm_E) @ w.qkv_OE.t() for p, w in at.items()}
        )
        q_THD, k_TGD, v_TGD = qkv_TO.unflatten(-1, (-1, config.head_dim)).split(split, dim=1)
        q_THD, k_TGD = _rotate(q_THD), _rotate(k_TGD)
        if entries_are_int8:
            k_TGD, v_TGD = _spread(_rounded(_spread(k_TGD))), _rounded(v_TGD)
        mask = causal_TT if mask_of is None else mask_of(layer)
        mask = mask if seen_of is None else seen_of(layer, q_THD, k_TGD)
        heads_HTD = F.scaled_dot_product_attention(
            q_THD.transpose(0, 1),
            k_TGD.repeat_interleave(config.num_heads // kv_heads, 1).transpose(0, 1),
            v_TGD.repeat_interleave(config.num_heads // kv_heads, 1).transpose(0, 1),
            attn_mask=mask,
        )
        heads_TA = heads_HTD.transpose(0, 1).flatten(1)
        hidden_TE = hidden_TE + pick(layer, {p: heads_TA @ w.out_EA.t() for p, w in at.items()})
        hidden_TE = hidden_TE + pick(layer, {p: _mlp(hidden_TE, w) for p, w in at.items()})
    logits = {
        path: _norm(hidden_TE, model.weights.final_norm_E) @ model.weights.lm_head_VE.t()
        for path, model in models.items()
    }
    return torch.stack([logits[head_of(t)][t] for t in range(num_tokens)])


def _norm(x_TE: Tensor, weight_E: Tensor) -> Tensor:
    eps = tiny().config.rms_norm_eps
    return x_TE / (x_TE.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight_E


def _mlp(hidden_TE: Tensor, layer: Any) -> Tensor:
    gate_TI, up_TI = (_norm(hidden_TE, layer.post_norm_E) @ layer.gate_up_JE.t()).chunk(2, -1)
    return (F.silu(gate_TI) * up_TI) @ layer.down_EI.t()


def _rotate(x_THD: Tensor) -> Tensor:
    """RoPE at positions 0, 1, ..."""
    weights, num_tokens = tiny().weights, len(x_THD)
    cos_TD = weights.cos_ND[:num_tokens, None]
    sin_TD = weights.sin_ND[:num_tokens, None]  # first half negated
    return x_THD * cos_TD + x_THD.roll(tiny().config.head_dim // 2, -1) * sin_TD


def _rounded(x_TGD: Tensor) -> Tensor:
    """To 255 steps of a scale per token and head, and back."""
    scale_TG1 = x_TGD.abs().amax(-1, keepdim=True) / 127
    return (x_TGD / scale_TG1).round() * scale_TG1


def _hadamard() -> Tensor:
    """Orthonormal ``[D, D]`` for a head size that is a power of two; its own inverse."""
    matrix_DD, head_dim = torch.ones(1, 1), tiny().config.head_dim
    while len(matrix_DD) < head_dim:
        matrix_DD = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix_DD)
    return matrix_DD / head_dim**0.5


def _spread(x_TGD: Tensor) -> Tensor:
    return x_TGD @ _hadamard()


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


def teacher_forced(
    llm: LLM, sequences: Sequence[Sequence[int]], prompt_len: int
) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """Logits [T, V] (from the prompt's last token on; all when everything is prompt) and routes per sequence."""
    shape = len(sequences), tiny().config.vocab_size
    got = [torch.full((len(ids), shape[1]), float("nan")) for ids in sequences]

    def make_sink(index: int) -> Callable[[int, Tensor], None]:
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
