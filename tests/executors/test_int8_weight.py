"""Guards W8A16 and the pool ``int8_shared``: the weights are int8, the activations are not, and both paths share them.

T tokens, E hidden size, O fused q, k, v outputs.
"""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tokenrouter.executors import build_pool
from tokenrouter.executors.full import FullExecutor
from tokenrouter.executors.int8 import Int8Executor
from tokenrouter.executors.int8_weight import Int8WeightExecutor
from tokenrouter.executors.packing import PackedLinears, PackedModel
from tokenrouter.kernels import KernelSet, select
from tokenrouter.models import LoadedModel, tiny_random

TOLERANCE = {
    "float32": 2**-12,
    "bfloat16": 2**-6,
}  # native takes 16 bits of a row's largest magnitude


@pytest.fixture(scope="module", params=["native", "reference"])
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    return select(request.param)


def dequantised(weight_NK: Tensor) -> Tensor:
    """The weights that int8 per output channel stands for, in double, from the definition."""
    wide_NK = weight_NK.float()
    scale_N1 = wide_NK.abs().amax(1, keepdim=True) / 127
    return (wide_NK / scale_N1).round().double() * scale_N1.double()


def hidden(model: LoadedModel, num_tokens: int = 33) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, model.config.hidden_size, generator=generator).to(model.dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_is_a_product_with_dequantised_weights(kernels: KernelSet, dtype: str) -> None:
    """A scale forgotten or applied twice, rounded activations, another layer's weights, a bias scaled."""
    model = tiny_random("qwen2", dtype=dtype, num_hidden_layers=2)
    executor = Int8WeightExecutor(PackedModel(model, kernels))
    hidden_TE, weights = hidden(model), model.weights
    for number, layer in enumerate(weights.layers):
        normed_TE = kernels.rms_norm(hidden_TE, layer.input_norm_E, model.config.rms_norm_eps)
        expected_TO = normed_TE.double() @ dequantised(layer.qkv_OE).t()
        assert layer.qkv_bias_O is not None
        expected_TO += layer.qkv_bias_O.double()
        out_TO = hidden_TE.new_full((len(hidden_TE), model.config.qkv_size), float("nan"))
        executor.qkv(number, hidden_TE, out_TO)
        atol = TOLERANCE[dtype] * float(expected_TO.abs().max())
        assert_close(out_TO.double(), expected_TO, rtol=TOLERANCE[dtype], atol=atol)
    normed_TE = kernels.rms_norm(hidden_TE, weights.final_norm_E, model.config.rms_norm_eps)
    expected_TV = normed_TE.double() @ dequantised(weights.lm_head_VE).t()
    atol = TOLERANCE[dtype] * float(expected_TV.abs().max())
    logits_TV = executor.logits(hidden_TE)
    assert_close(logits_TV.double(), expected_TV, rtol=TOLERANCE[dtype], atol=atol)


def test_is_closer_to_full_than_int8_is(kernels: KernelSet) -> None:
    """The high path of the shared pool quantising its activations after all."""
    model = tiny_random("llama")
    packed = PackedModel(model, kernels)
    hidden_TE, errors = hidden(model), {}
    expected_TE = hidden_TE.clone()
    heads_TA = torch.randn(len(hidden_TE), model.config.num_heads * model.config.head_dim)
    FullExecutor(packed).finish_layer(0, heads_TA, expected_TE)
    for executor in (Int8WeightExecutor(packed), Int8Executor(packed)):
        got_TE = hidden_TE.clone()
        executor.finish_layer(0, heads_TA, got_TE)
        errors[executor.name] = float((got_TE - expected_TE).norm())
    assert 0 < errors["int8_weight"] < 0.9 * errors["int8"]


def test_the_shared_pool_stores_its_weights_once(kernels: KernelSet) -> None:
    """Two copies of the int8 weights: the memory and the stream that sharing is there to save."""
    model = tiny_random("llama")
    shared = build_pool("int8_shared", model, kernels=kernels).executors
    high, low = shared["high"].packed_weights, shared["low"].packed_weights
    assert [w.data_ptr() for w in high] == [w.data_ptr() for w in low]
    assert len({w.data_ptr() for w in high}) == len(high)
    mixed = build_pool("int8", model, kernels=kernels).executors
    apart = {w.data_ptr() for w in mixed["high"].packed_weights}
    assert not apart & {w.data_ptr() for w in mixed["low"].packed_weights}


def test_the_shared_pool_packs_no_dense_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of int8 weights that packs the full ones too holds more than it claims."""
    made: list[str] = []
    pack = PackedLinears.of.__func__  # type: ignore[attr-defined]

    def record(cls: type, model: LoadedModel, how: object) -> PackedLinears:
        made.append(how.__name__)  # type: ignore[attr-defined]
        return pack(cls, model, how)

    monkeypatch.setattr(PackedLinears, "of", classmethod(record))
    build_pool("int8_shared", tiny_random("llama", num_hidden_layers=1))
    assert made == ["pack_int8"]
    build_pool("int8", tiny_random("llama", num_hidden_layers=1))
    assert sorted(made[1:]) == ["pack_int8", "pack_matmul"]
