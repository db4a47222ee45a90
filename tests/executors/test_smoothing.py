"""Guards smoothing: before rounding it changes nothing, and what it divides is really divided.

T tokens, E hidden size, K inputs of a linear, I intermediate.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from tokenrouter.executors.activations import InputMaxima
from tokenrouter.executors.smoothing import Smoothing, factors, smooth
from tokenrouter.models import LoadedModel, tiny_random
from tokenrouter.models.weights import LayerWeights

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


def maxima(model: LoadedModel) -> InputMaxima:
    """Some channels three orders of magnitude larger than others."""
    generator = torch.Generator().manual_seed(0)
    width, inner = model.config.hidden_size, model.weights.layers[0].down_EI.shape[1]

    def draw(size: int) -> Tensor:
        return torch.randn(size, generator=generator).mul(1.5).exp()

    return InputMaxima(qkv_E=draw(width), gate_up_E=draw(width), down_I=draw(inner))


def products(layer: LayerWeights, hidden_TE: Tensor) -> dict[str, Tensor]:
    """What the layer's smoothed linears give, in float32 from the norm's weight on."""
    normed_TE = F.rms_norm(hidden_TE, hidden_TE.shape[-1:], eps=1e-5)
    bias_J, down_bias_E = layer.gate_up_bias_J, layer.down_bias_E
    gate_up_TJ = F.linear(
        normed_TE * layer.post_norm_E.float(),
        layer.gate_up_JE.float(),
        None if bias_J is None else bias_J.float(),
    )
    gate_TI, up_TI = gate_up_TJ.chunk(2, -1)
    return {
        "qkv": F.linear(normed_TE * layer.input_norm_E.float(), layer.qkv_OE.float()),
        "gate": gate_TI,
        "down": F.linear(F.silu(gate_TI) * up_TI, layer.down_EI.float(), down_bias_E),
    }


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("alpha", [0.0, 0.35, 0.5, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_smoothed_products_are_equal_before_rounding(which: str, alpha: float, dtype: str) -> None:
    """A factor in the norm and not in the weights, gate divided too, a bias left as it was, a rounded norm's error."""
    exact = tiny_random("llama", num_hidden_layers=1, **MODELS[which])
    model = exact.astype(dtype)
    layer = model.weights.layers[0]
    if layer.down_bias_E is not None:
        layer = replace(layer, down_bias_E=layer.down_bias_E.float())
    smoothed = smooth(layer, maxima(model), alpha, 1 - alpha)
    hidden_TE = torch.randn(
        40, model.config.hidden_size, generator=torch.Generator().manual_seed(1)
    )
    ours, plain = products(smoothed, hidden_TE), products(layer, hidden_TE)
    for name, expected in plain.items():
        assert_close(ours[name], expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert smoothed.input_norm_E.dtype == smoothed.post_norm_E.dtype == model.dtype
    assert smoothed.out_EA is layer.out_EA and smoothed.qkv_bias_O is layer.qkv_bias_O


def test_one_end_levels_the_inputs_and_the_other_the_weights() -> None:
    """Alpha taken the wrong way round, or rows of weights for columns."""
    model = tiny_random("llama", num_hidden_layers=1)
    layer, found = model.weights.layers[0], maxima(model)
    for alpha in (0.0, 1.0):
        smoothed = smooth(layer, found, alpha, alpha)
        divided_E = layer.input_norm_E / smoothed.input_norm_E
        divided_I = (layer.gate_up_JE[160:] / smoothed.gate_up_JE[160:]).abs()
        divided_I *= (smoothed.gate_up_JE[:160] / layer.gate_up_JE[:160]).mean(0)
        inputs = found.qkv_E / divided_E, found.down_I / divided_I.mean(1)
        weights = (
            (smoothed.qkv_OE / layer.qkv_OE.abs().amax(1, keepdim=True)).abs().amax(0),
            (smoothed.down_EI / layer.down_EI.abs().amax(1, keepdim=True)).abs().amax(0),
        )
        level, uneven = (inputs, weights) if alpha else (weights, inputs)
        for values_K in level:
            assert_close(values_K, values_K[:1].expand_as(values_K), rtol=1e-4, atol=0)
        for values_K in uneven:
            assert values_K.max() > 3 * values_K.min()


def test_factors_are_the_papers_up_to_a_common_one() -> None:
    """Another power, or maxima of the wrong dimension; factors that leave a norm no room in float16."""
    weight_NK = torch.tensor([[1.0, -4.0, 0.5], [-4.0, 1.0, 0.25]])
    factor_K = factors(torch.tensor([8.0, 1.0, 0.5]), weight_NK, 0.25)
    expected_K = torch.tensor([8.0, 1.0, 0.5]) ** 0.25 / torch.tensor([4.0, 4.0, 0.5]) ** 0.75
    assert_close(factor_K / factor_K[0], expected_K / expected_K[0])
    assert_close(factor_K.log().mean(), torch.tensor(0.0), atol=1e-6, rtol=0)


def test_the_scale_of_an_output_channel_has_no_influence() -> None:
    """One large row deciding for all, though each has a scale of its own."""
    weight_NK = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    large_N1 = torch.tensor([1e3, 1.0, 2.0, 1e-3, 5.0, 0.0])[:, None]
    found = factors(torch.arange(1.0, 6.0), weight_NK[:5], 0.5)
    assert_close(factors(torch.arange(1.0, 6.0), weight_NK * large_N1, 0.5), found)


def test_a_dead_channel_has_factor_one() -> None:
    """Zero to the power of alpha: a norm divided by 0, or a weight multiplied by infinity."""
    weight_NK = torch.tensor([[1.0, 0.0, 3.0, 1e-30], [2.0, 0.0, 1.0, 0.0]])
    for alpha in (0.0, 0.5, 1.0):
        factor_K = factors(torch.tensor([0.0, 5.0, 2.0, 1e30]), weight_NK, alpha)
        assert factor_K[:2].tolist() == [1.0, 1.0]
        assert (factor_K > 0).all() and factor_K.isfinite().all()
    assert factors(torch.zeros(4), weight_NK, 0.5).tolist() == [1.0] * 4


def test_a_norm_without_room_for_a_factor_stays() -> None:
    """A float16 norm that a factor takes to 0 or infinity: the channel's input would be lost, or NaN."""
    model = tiny_random("llama", num_hidden_layers=1, dtype="float16")
    layer, found = model.weights.layers[0], maxima(model)
    found.qkv_E[0], found.qkv_E[1] = 1e30, 1e-30
    layer.input_norm_E[2] = 0.0
    smoothed = smooth(layer, found, 1.0, 1.0)
    assert smoothed.input_norm_E.isfinite().all() and smoothed.qkv_OE.isfinite().all()
    hidden_TE = torch.randn(8, model.config.hidden_size)
    expected = products(layer, hidden_TE)["qkv"]
    assert_close(products(smoothed, hidden_TE)["qkv"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan"), float("inf"), "0.5", True, None])
def test_alpha_is_checked_before_a_model_is_loaded(alpha: Any) -> None:
    """A NaN that passes a comparison; a typo on the command line that shows after minutes, as a TypeError."""
    with pytest.raises(ValueError, match=r"smoothing alpha=.* must be a number from 0 .* to 1"):
        Smoothing(alpha=alpha)
    with pytest.raises(ValueError, match=r"smoothing down_alpha=.* must be a number from 0 "):
        Smoothing(down_alpha=alpha)
