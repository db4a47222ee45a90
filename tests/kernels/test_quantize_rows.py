"""Guards per-token quantisation: range, rounding, zero and huge rows, and that no row sees another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tokenrouter.kernels import KernelSet

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_scales(kernels: KernelSet, dtype: torch.dtype) -> None:
    """A scale of amax/128, truncation instead of rounding, or -128 in the result."""
    torch.manual_seed(0)
    smallest = -1 if dtype == torch.float16 else -3
    x_TK = (torch.randn(20, 96) * torch.logspace(smallest, 3, 20)[:, None]).to(dtype)
    before_TK = x_TK.clone()
    rows = kernels.quantize_rows(x_TK)
    assert torch.equal(x_TK, before_TK), "the input was modified"
    scale_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    assert rows.q_TK.dtype == torch.int8 and rows.scale_T1.dtype == scale_dtype
    assert rows.scale_T1.shape == (20, 1)
    amax_T1 = x_TK.double().abs().amax(-1, keepdim=True)
    rounding = torch.finfo(dtype).eps
    assert_close(rows.scale_T1.double(), amax_T1 / 127, rtol=rounding, atol=0)
    assert (rows.q_TK.int().abs().amax(-1) == 127).all() and int(rows.q_TK.min()) >= -127
    error_TK = (rows.q_TK.double() * rows.scale_T1.double() - x_TK.double()).abs()
    assert (error_TK <= (0.501 + 127 * rounding) * amax_T1 / 127).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rounded_scale_never_leaves_the_range(kernels: KernelSet, dtype: torch.dtype) -> None:
    """The scale is rounded to the dtype, possibly down: amax / scale must still round to 127, not to 128."""
    amax_T1 = torch.linspace(1, 2, 4001)[:, None].to(dtype)
    rows = kernels.quantize_rows(torch.cat((amax_T1, -amax_T1, 0 * amax_T1), dim=1))
    assert (rows.q_TK.unique(dim=0) == torch.tensor([[127, -127, 0]])).all()


def test_small_rows_in_float16(kernels: KernelSet) -> None:
    """A row whose largest value is below 127 times 6e-5 keeps only a few of its 127 levels."""
    x_TK = (torch.linspace(-1, 1, 96)[None] * 1e-3).half()
    rows = kernels.quantize_rows(x_TK)
    assert int(rows.q_TK.int().abs().max()) == 127


def test_rounds_half_to_even(kernels: KernelSet) -> None:
    """Half away from zero is what a native kernel does by default; the results then differ."""
    x_TK = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0]])
    assert kernels.quantize_rows(x_TK).q_TK.tolist() == [[127, 0, 2, 2, 0, -2, -2, -127]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_row_and_the_largest_numbers(kernels: KernelSet, dtype: torch.dtype) -> None:
    """0/0 in a padded or dead row; an overflow of 127/amax or amax*127 at the ends of the range."""
    most = torch.finfo(dtype).max
    x_TK = torch.zeros(4, 32, dtype=dtype)
    x_TK[1, 3], x_TK[1, 4] = most, -most
    x_TK[2, 0], x_TK[2, 1] = 1e-2, -5e-3
    x_TK[3] = -most
    rows = kernels.quantize_rows(x_TK)
    assert not rows.q_TK[0].any() and rows.scale_T1.isfinite().all()
    assert rows.q_TK[1, 3:5].tolist() == [127, -127] and not rows.q_TK[1, 5:].any()
    assert int(rows.q_TK[2, 0]) == 127 and int(rows.q_TK[2, 1]) in (-63, -64)
    assert (rows.q_TK[3] == -127).all()


def test_no_tokens(kernels: KernelSet) -> None:
    """A forward in which a route has no token."""
    rows = kernels.quantize_rows(torch.zeros(0, 16))
    assert rows.q_TK.shape == (0, 16) and rows.scale_T1.shape == (0, 1)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), num_rows=st.integers(1, 40), scale=st.floats(1e-10, 1e10))
def test_no_row_sees_another(seed: int, num_rows: int, scale: float) -> None:
    """Per-tensor scales, with which a token's result depends on its batch mates."""
    from tokenrouter.kernels import select

    kernels = select()
    generator = torch.Generator().manual_seed(seed)
    x_TK = torch.randn(num_rows, 24, generator=generator) * scale
    x_TK[seed % num_rows] *= 1e3
    together = kernels.quantize_rows(x_TK)
    for row in {0, num_rows // 2, num_rows - 1}:
        alone = kernels.quantize_rows(x_TK[row : row + 1])
        assert torch.equal(alone.q_TK[0], together.q_TK[row])
        assert torch.equal(alone.scale_T1[0], together.scale_T1[row])
