"""Guards the norm: statistics in float32, eps inside the root, no row sees another, nothing is modified."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.kernels.conftest import Typed
from tokenrouter.kernels import KernelSet

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize(
    "shape", [(1, 64), (7, 576), (3, 5, 16), (0, 64), (4, 1), (5, 37), (2, 3, 80), (0, 4, 8)]
)
def test_equals_the_formula(typed: Typed, shape: tuple[int, ...]) -> None:
    """Statistics in half precision, a norm without eps, or rows mixed up where there are heads."""
    kernels, dtype = typed
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3 + 1).to(dtype)
    weight_E = torch.randn(shape[-1]).to(dtype)
    before = x.clone()
    result = kernels.rms_norm(x, weight_E, 1e-5)
    assert result.dtype == dtype and result.shape == x.shape
    assert torch.equal(x, before), "the input was modified"
    tolerance = TOLERANCE[dtype]
    assert_close(result.double(), formula(x, weight_E, 1e-5), rtol=tolerance, atol=tolerance)


def test_eps_decides_for_small_rows(kernels: KernelSet) -> None:
    """A row of zeros divides by zero, or eps is added outside the root."""
    x_TE = torch.zeros(3, 8)
    x_TE[1] = 1e-3
    x_TE[2] = 1e-20
    weight_E = torch.ones(8)
    result = kernels.rms_norm(x_TE, weight_E, 1e-6)
    assert torch.equal(result[0], torch.zeros(8))
    assert_close(result.double(), formula(x_TE, weight_E, 1e-6), rtol=1e-5, atol=0)


def test_is_that_of_transformers_in_bfloat16(kernels: KernelSet) -> None:
    """Statistics in half precision, or a rounding that drifts from the reference model to one side."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(1)
    norm = LlamaRMSNorm(576, eps=1e-5).to(torch.bfloat16)
    norm.weight.data.normal_()
    x_TE = torch.randn(50, 576).to(torch.bfloat16)
    ours, theirs = kernels.rms_norm(x_TE, norm.weight.data, 1e-5), norm(x_TE).detach()
    assert_close(ours, theirs, rtol=2**-6, atol=0)
    assert_close(ours.double().mean(), theirs.double().mean(), rtol=1e-3, atol=1e-4)


def test_takes_a_strided_view_and_no_row_sees_another(kernels: KernelSet) -> None:
    """Head norms run on a part of the fused projection; a batch changes no token's bits."""
    torch.manual_seed(2)
    heads_THD, weight_D = torch.randn(6, 8, 16), torch.randn(16)
    together = kernels.rms_norm(heads_THD[:, 2:5], weight_D, 1e-6)
    for row in range(6):
        alone = kernels.rms_norm(heads_THD[row : row + 1, 2:5].contiguous(), weight_D, 1e-6)
        assert torch.equal(alone[0], together[row])
