"""Guards the dense product: right in every dtype, weights packed once and left alone."""

import pytest
import torch
from torch.testing import assert_close

from tests.kernels.conftest import Typed

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_out", "num_in"),
    [(1, 64, 32), (5, 97, 51), (70, 48, 64), (1, 1, 1), (17, 31, 1), (33, 1, 130), (2, 3, 1537)],
)
def test_equals_the_formula(
    typed: Typed, num_rows: int, num_out: int, num_in: int, with_bias: bool
) -> None:
    """A packed layout read as if it were plain, a bias dropped, odd sizes."""
    kernels, dtype = typed
    torch.manual_seed(0)
    weight_NK = torch.randn(num_out, num_in).to(dtype)
    bias_N = torch.randn(num_out).to(dtype) if with_bias else None
    copy_NK = weight_NK.clone()
    packed = kernels.pack_matmul(weight_NK, bias_N)
    x_TK = torch.randn(num_rows, num_in).to(dtype)
    result_TN = kernels.matmul(x_TK, packed)
    assert result_TN.dtype == dtype and torch.equal(weight_NK, copy_NK)
    expected_TN = x_TK.double() @ weight_NK.double().t()
    if bias_N is not None:
        expected_TN += bias_N.double()
    atol = TOLERANCE[dtype] * num_in**0.5
    assert_close(result_TN.double(), expected_TN, rtol=TOLERANCE[dtype], atol=atol)


def test_takes_a_slice_of_a_larger_tensor(typed: Typed) -> None:
    """A slice of the residual stream starts inside its storage; a copied pointer would not."""
    kernels, dtype = typed
    torch.manual_seed(1)
    packed = kernels.pack_matmul(torch.randn(32, 16).to(dtype), None)
    x_TK = torch.randn(9, 16).to(dtype)
    whole_TN = kernels.matmul(x_TK, packed)
    part_TN = kernels.matmul(x_TK[4:7], packed)
    atol = 4 * TOLERANCE[dtype]
    assert_close(part_TN, whole_TN[4:7], rtol=TOLERANCE[dtype], atol=atol)


def test_no_tokens(typed: Typed) -> None:
    """A slice without tokens is refused by the library underneath."""
    kernels, dtype = typed
    packed = kernels.pack_matmul(torch.randn(32, 16).to(dtype), torch.randn(32).to(dtype))
    assert kernels.matmul(torch.zeros(0, 16, dtype=dtype), packed).shape == (0, 32)
