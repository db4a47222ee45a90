"""Guards the gated activation: gate is the first half, up the second."""

import pytest
import torch
from torch.testing import assert_close

from tests.kernels.conftest import Typed
from tokenrouter.kernels import KernelSet

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


@pytest.mark.parametrize("num_rows", [0, 1, 13])
@pytest.mark.parametrize("width", [1, 16, 21, 64, 97])
def test_equals_the_formula(typed: Typed, num_rows: int, width: int) -> None:
    """Halves swapped, interleaved instead of side by side, or the input overwritten."""
    kernels, dtype = typed
    torch.manual_seed(0)
    gate_up_TJ = (4 * torch.randn(num_rows, 2 * width)).to(dtype)
    before_TJ = gate_up_TJ.clone()
    result_TI = kernels.silu_mul(gate_up_TJ)
    gate_TI, up_TI = gate_up_TJ.double()[:, :width], gate_up_TJ.double()[:, width:]
    expected_TI = gate_TI / (1 + (-gate_TI).exp()) * up_TI
    assert torch.equal(gate_up_TJ, before_TJ)
    assert result_TI.dtype == dtype
    tolerance = TOLERANCE[dtype]
    assert_close(result_TI.double(), expected_TI, rtol=tolerance, atol=tolerance)


def test_large_gates_do_not_overflow(kernels: KernelSet) -> None:
    """exp of a large negative gate is infinite: 0 * inf; one that is clamped instead leaves gate / exp(clamp)."""
    result_TI = kernels.silu_mul(torch.tensor([[-200.0, -3e38, 200.0, 3.0, 3.0, 2.0]]))
    assert result_TI.tolist() == [[0.0, 0.0, 400.0]]
