"""Guards the decoder that labels are computed with: it is the engine's function, and its gradients are right.

N tokens, L layers, P linears, V vocabulary, E hidden size.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.training.conftest import random_ids
from tokenrouter import LLM
from tokenrouter.executors import POOLS, PoolSpec, build_pool
from tokenrouter.executors.calibration import Calibration
from tokenrouter.executors.full import FullExecutor
from tokenrouter.executors.int8_smooth import Int8SmoothExecutor
from tokenrouter.executors.smoothing import Smoothing
from tokenrouter.kernels import ReferenceKernels
from tokenrouter.models import LoadedModel, tiny_random
from tokenrouter.routers import AllHighRouter, AllLowRouter, Router
from tokenrouter.training.gradients import DifferentiableDecoder
from tokenrouter.training.low_path import Int8SmoothLow, LowPath, PlainLow, low_path

ALL_LOW = torch.ones(1, 1, 1, dtype=torch.bool)
MODELS = {
    "llama": {},
    "mistral": {"sliding_window": 20},
    "qwen2": {},
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 3},
}


def engine_logits(
    model: LoadedModel, spec: PoolSpec | str, router: Router, ids_N: Tensor
) -> Tensor:
    pool = build_pool(spec, model, kernels="reference")
    parts: list[Tensor] = []
    llm = LLM(model, router=router, executors=pool)
    llm.score([ids_N.tolist()], sink=lambda _, position, logits: parts.append(logits.clone()))
    return torch.cat(parts)


def built(model: LoadedModel, low: LowPath) -> DifferentiableDecoder:
    return DifferentiableDecoder(model, low, ReferenceKernels())


@pytest.mark.parametrize(
    ("family", "pool"),
    [*((family, "int8") for family in MODELS), ("qwen2", "int4"), ("qwen2", "int8_weight")],
)
def test_both_paths_are_the_engines(family: str, pool: str) -> None:
    """A wrong RoPE sign, head norm, bias, window or group of heads; a low path that rounds unlike its pool."""
    model, ids_N = tiny_random(family, **MODELS[family]), random_ids(90)
    decoder = built(model, low_path(POOLS[pool], model))
    high_NV = decoder.logits(decoder.trace(ids_N).inputs[-1])
    low_NV = decoder.logits(decoder.routed(ids_N, ALL_LOW)[0])
    expected_NV = engine_logits(model, pool, AllLowRouter(), ids_N)
    engine_NV = engine_logits(model, pool, AllHighRouter(), ids_N)
    torch.testing.assert_close(high_NV, engine_NV, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(low_NV[:5], expected_NV[:5], atol=1e-3, rtol=1e-3)
    # A value on the edge between two integers may be rounded either way, which later tokens see.
    assert (low_NV - expected_NV).norm() < 0.3 * (low_NV - high_NV).norm()
    assert (low_NV - high_NV).abs().max() > 0.05


@pytest.fixture(scope="module")
def smoothing(tmp_path_factory: pytest.TempPathFactory) -> Smoothing:
    folder = tmp_path_factory.mktemp("calibration")
    return Smoothing(calibration=Calibration(num_tokens=256, cache_dir=str(folder)))


def test_the_smoothed_path_is_the_executors(model: LoadedModel, smoothing: Smoothing) -> None:
    """Norms of the plain path in front of smoothed weights, or scales of down that are taken out twice or not."""
    ids_N = random_ids(60)
    spec = PoolSpec(low=lambda packed: Int8SmoothExecutor(packed, smoothing))
    decoder = built(model, Int8SmoothLow(model, smoothing))
    low_NV = decoder.logits(decoder.routed(ids_N, ALL_LOW)[0])
    high_NV = decoder.logits(decoder.trace(ids_N).inputs[-1])
    difference_NV = low_NV - engine_logits(model, spec, AllLowRouter(), ids_N)
    assert difference_NV.norm() < 0.1 * (low_NV - high_NV).norm()


@pytest.mark.parametrize("linear", range(4))
def test_differences_of_the_smoothed_path_are_rounding_alone(
    model: LoadedModel, smoothing: Smoothing, ids_N: Tensor, linear: int
) -> None:
    """Scales between up and down that stay in a difference: it is then as large as the output itself."""
    decoder = built(model, Int8SmoothLow(model, smoothing))
    hidden_NE = decoder.trace(ids_N).inputs[1]
    high = decoder._high.run(1, hidden_NE)
    output = decoder._low[1].linears(hidden_NE, high)[linear]
    assert (output - high.linears[linear]).norm() < 0.03 * high.linears[linear].norm()


def test_effects_are_the_derivative_along_the_error(
    decoder: DifferentiableDecoder, ids_N: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient at another linear's output, of another token, or with the wrong sign."""
    trace = decoder.trace(ids_N)
    effects_LPN = decoder.effects(trace, decoder.text_gradients(trace))[0]
    layer, token, step = 1, 30, 0.5
    hidden_NE = trace.inputs[layer]
    high = decoder._high.run(layer, hidden_NE)
    low = decoder._low[layer].linears(hidden_NE, high)
    for linear, name in enumerate(("qkv", "out", "gate_up", "down")):
        found = []
        for sign in (step, -step):
            change = torch.zeros_like(low[linear])
            change[token] = sign * (low[linear] - high.linears[linear])[token]
            found.append(_text_logp(decoder, ids_N, layer, name, change, monkeypatch))
        slope = (found[0] - found[1]) / (2 * step)
        assert slope == pytest.approx(effects_LPN[layer, linear, token].item(), rel=0.05, abs=2e-4)


def _text_logp(
    decoder: DifferentiableDecoder,
    ids_N: Tensor,
    layer: int,
    name: str,
    change: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> float:
    """Of the window's own tokens, with ``change`` added to one linear's output in one layer."""
    original = getattr(decoder._high, name)
    with monkeypatch.context() as patch:
        patch.setattr(
            decoder._high, name, lambda i, x: original(i, x) + (change if i == layer else 0)
        )
        hidden_NE = decoder.trace(ids_N).inputs[-1]
    logp_NV = decoder.logits(hidden_NE).double().log_softmax(-1)
    return float(logp_NV[:-1].gather(1, ids_N[1:, None]).sum())


def test_tokens_before_the_low_one_do_not_move(
    decoder: DifferentiableDecoder, ids_N: Tensor
) -> None:
    """A mask on the wrong token or layer, or attention that looks ahead."""
    is_low_BLN = torch.zeros(2, 4, len(ids_N), dtype=torch.bool)
    is_low_BLN[0, :, 40] = True
    is_low_BLN[1, 2, 40] = True
    high_NE, low_BNE = decoder.trace(ids_N).inputs[-1], decoder.routed(ids_N, is_low_BLN)
    moved_BN = (low_BNE - high_NE).norm(dim=-1) / high_NE.norm(dim=-1)
    assert moved_BN[:, :40].max() < 1e-5 < 1e-4 < moved_BN[:, 40].min()
    assert moved_BN[0, 40] != moved_BN[1, 40]


def test_weights_get_no_gradients(decoder: DifferentiableDecoder, ids_N: Tensor) -> None:
    """Memory for gradients of weights, which nobody asks for; a model that training changed."""
    trace = decoder.trace(ids_N)
    decoder.effects(trace, decoder.text_gradients(trace))
    weights = decoder.model.weights
    for tensor in (weights.embed_VE, weights.layers[0].qkv_OE, weights.final_norm_E):
        assert tensor.grad is None and not tensor.requires_grad


def test_another_dtype_is_refused(model: LoadedModel) -> None:
    """Labels in bfloat16, whose rounding is as large as what they measure."""
    narrow = model.astype("bfloat16")
    with pytest.raises(ValueError, match=r"float32 and the model is in torch\.bfloat16"):
        DifferentiableDecoder(narrow, PlainLow(model=narrow))


def test_ids_and_lengths_are_checked(decoder: DifferentiableDecoder) -> None:
    """An index error in the middle of a run, or a window of another model's tokens."""
    with pytest.raises(ValueError, match=r"0 \.\. 383, got 3 to 400: were they encoded with"):
        decoder.trace(torch.tensor([3, 400]))
    for ids_N in (torch.empty(0, dtype=torch.int64), torch.full((4097,), 5)):
        with pytest.raises(ValueError, match=f"1 to 4096 tokens .*got {len(ids_N)}"):
            decoder.trace(ids_N)


def test_a_model_that_is_not_finite_is_refused(model: LoadedModel) -> None:
    """NaN labels that a router would learn from."""
    broken = replace(model.weights, embed_VE=model.weights.embed_VE * torch.nan)
    decoder = built(replace(model, weights=broken), PlainLow(model=model))
    with pytest.raises(ValueError, match="activations of model 'tiny_llama' are not finite"):
        decoder.trace(random_ids(8))


def test_low_path_of_a_pool(model: LoadedModel, smoothing: Smoothing) -> None:
    """Labels of the plain path for a router of the smoothed one; a pool without an error to learn."""
    from functools import partial

    from tokenrouter.executors.int8 import Int8Executor

    assert low_path(PoolSpec(low=partial(Int8Executor)), model).executor == "int8"
    smooth = low_path(PoolSpec(low=partial(Int8SmoothExecutor, smoothing=smoothing)), model)
    assert smooth.executor == "int8_smooth" and smooth.version == smoothing.fold(model).version
    with pytest.raises(ValueError, match="has none: set executor=int8, executor=int4"):
        low_path(PoolSpec(), model)
    for name in ("int4", "int8_weight"):
        assert low_path(POOLS[name], model).executor == name
    with pytest.raises(ValueError, match="low path 'full': set executor=int8, executor=int4"):
        low_path(PoolSpec(low=FullExecutor), model)
