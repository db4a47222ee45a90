"""Guards W8A8: a token's linears give the same bits whatever its batch mates, and are close to the high path."""

import pytest
import torch
from torch import Tensor

from tokenrouter.executors.base import Executor
from tokenrouter.executors.full import FullExecutor
from tokenrouter.executors.int8 import Int8Executor
from tokenrouter.executors.packing import PackedModel
from tokenrouter.kernels import KernelSet, select
from tokenrouter.models import LoadedModel, tiny_random

SIZES = (*range(1, 20), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return tiny_random("qwen2", dtype=request.param, num_hidden_layers=2, hidden_size=96)


@pytest.fixture(scope="module", params=["native", "reference"])
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    return select(request.param)


def inputs(model: LoadedModel) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    config = model.config
    hidden_TE = torch.randn(max(SIZES), config.hidden_size, generator=generator)
    hidden_TE *= torch.logspace(-2, 2, max(SIZES))[:, None]
    heads_TA = torch.randn(max(SIZES), config.num_heads * config.head_dim, generator=generator)
    heads_TA[5] *= 1e4
    return hidden_TE.to(model.dtype), heads_TA.to(model.dtype)


def qkv(executor: Executor, model: LoadedModel, layer: int, hidden_TE: Tensor) -> Tensor:
    out_TO = hidden_TE.new_full((hidden_TE.shape[0], model.config.qkv_size), float("nan"))
    executor.qkv(layer, hidden_TE, out_TO)
    return out_TO


def test_every_linear_gives_a_token_the_same_bits_in_any_batch(
    loaded: LoadedModel, kernels: KernelSet
) -> None:
    """Another kernel or another order of sums for another number of rows; a scale shared by rows."""
    executor = Int8Executor(PackedModel(loaded, kernels))
    hidden_TE, heads_TA = inputs(loaded)

    def rest(rows: slice) -> Tensor:
        result_TE = hidden_TE[rows].clone()
        executor.finish_layer(1, heads_TA[rows], result_TE)
        return result_TE

    linears = {
        "qkv": lambda rows: qkv(executor, loaded, 1, hidden_TE[rows]),
        "rest": rest,
        "logits": lambda rows: executor.logits(hidden_TE[rows]),
    }
    for name, linear in linears.items():
        alone = torch.cat([linear(slice(t, t + 1)) for t in range(max(SIZES))])
        for size in SIZES:
            assert torch.equal(linear(slice(0, size)), alone[:size]), f"{name} with {size} tokens"


def test_a_layer_gives_the_same_bits_in_any_order(loaded: LoadedModel, kernels: KernelSet) -> None:
    """Output projection, gate, up and down with tokens in another row of the same batch."""
    executor = Int8Executor(PackedModel(loaded, kernels))
    hidden_TE, heads_TA = inputs(loaded)
    order_T = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    first_TE, second_TE = hidden_TE[:64].clone(), hidden_TE[:64][order_T].clone()
    executor.finish_layer(0, heads_TA[:64], first_TE)
    executor.finish_layer(0, heads_TA[:64][order_T], second_TE)
    assert torch.equal(first_TE[order_T], second_TE)


def test_streams_fewer_bytes_than_the_high_path(kernels: KernelSet) -> None:
    """The cost model and the tables would call the low path as expensive as the high one."""
    model = tiny_random("llama", intermediate_size=128)  # whole panels: no padding

    def streamed(executor: Executor) -> int:
        return sum(w.numel() * w.element_size() for w in executor.packed_weights)

    packed = PackedModel(model, kernels)
    low, high = streamed(Int8Executor(packed)), streamed(FullExecutor(packed))
    assert 3.9 * low < high < 4.1 * low
    half = streamed(FullExecutor(PackedModel(model.astype("bfloat16"), kernels)))
    assert 1.9 * half < high < 2.1 * half


def test_a_small_error_and_not_none(kernels: KernelSet) -> None:
    """An int8 path that runs the full product, or one whose scales are off by a little."""
    model = tiny_random("llama")
    packed = PackedModel(model, kernels)
    low, high = Int8Executor(packed), FullExecutor(packed)
    hidden_TE = torch.randn(
        50, model.config.hidden_size, generator=torch.Generator().manual_seed(2)
    )
    for layer in range(model.config.num_layers):
        expected_TO = qkv(high, model, layer, hidden_TE)
        error = (qkv(low, model, layer, hidden_TE) - expected_TO).norm() / expected_TO.norm()
        assert 1e-3 < error < 3e-2
