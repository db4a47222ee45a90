"""Guards per-token quantisation: range, rounding, zero and huge rows, and that no row sees another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.kernels.conftest import NATIVE_DTYPES, Typed
from tokenrouter.kernels import KernelSet, NativeKernels, QuantizedRows, ReferenceKernels, select


def test_values_and_scales(typed: Typed) -> None:
    """A scale of amax/128, truncation instead of rounding, or -128 in the result."""
    kernels, dtype = typed
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


def test_a_rounded_scale_never_leaves_the_range(typed: Typed) -> None:
    """The scale is rounded to the dtype, possibly down: amax / scale must still round to 127, not to 128."""
    kernels, dtype = typed
    count = 601 if kernels.name == "triton" else 4001  # a row at a time in an interpreter
    amax_T1 = torch.linspace(1, 2, count)[:, None].to(dtype)
    rows = kernels.quantize_rows(torch.cat((amax_T1, -amax_T1, 0 * amax_T1), dim=1))
    assert (rows.q_TK.unique(dim=0) == torch.tensor([[127, -127, 0]])).all()


def test_small_rows_in_float16() -> None:
    """A row whose largest value is below 127 times 6e-5 keeps only a few of its 127 levels."""
    kernels = ReferenceKernels()
    x_TK = (torch.linspace(-1, 1, 96)[None] * 1e-3).half()
    rows = kernels.quantize_rows(x_TK)
    assert int(rows.q_TK.int().abs().max()) == 127


def test_rounds_half_to_even(kernels: KernelSet) -> None:
    """Half away from zero is what a native kernel does by default; the results then differ."""
    x_TK = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0]])
    assert kernels.quantize_rows(x_TK).q_TK.tolist() == [[127, 0, 2, 2, 0, -2, -2, -127]]


def test_zero_row_and_the_largest_numbers(typed: Typed) -> None:
    """0/0 in a padded or dead row; an overflow of 127/amax or amax*127 at the ends of the range."""
    kernels, dtype = typed
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
    kernels = select()
    generator = torch.Generator().manual_seed(seed)
    x_TK = torch.randn(num_rows, 24, generator=generator) * scale
    x_TK[seed % num_rows] *= 1e3
    together = kernels.quantize_rows(x_TK)
    for row in {0, num_rows // 2, num_rows - 1}:
        alone = kernels.quantize_rows(x_TK[row : row + 1])
        assert torch.equal(alone.q_TK[0], together.q_TK[row])
        assert torch.equal(alone.scale_T1[0], together.scale_T1[row])


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("width", [1, 7, 16, 33, 64, 97, 576, 1536])
def test_native_has_the_bits_of_the_reference(
    level: NativeKernels, dtype: torch.dtype, width: int
) -> None:
    """Product and rounding fused into one operation: where a value lies near a half, it rounds to the other side."""
    generator = torch.Generator().manual_seed(width)
    for exponent in (-20, 0, 20):
        x_TK = torch.randn(151, width, generator=generator).mul_(10.0**exponent).to(dtype)
        ours, theirs = level.quantize_rows(x_TK), ReferenceKernels().quantize_rows(x_TK)
        assert torch.equal(ours.scale_T1, theirs.scale_T1)
        assert torch.equal(ours.q_TK, theirs.q_TK), f"{(ours.q_TK != theirs.q_TK).sum()} values"


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_native_has_the_bits_of_the_reference_at_the_ends(
    level: NativeKernels, dtype: torch.dtype
) -> None:
    """Rows of zeros, of denormals, of the smallest scale's size and of the largest numbers."""
    sizes = (0.0, -0.0, 1e-45, 1e-40, 1e-38, 1.2e-36, 1e-35, 1.27e-33, 1e-30, 1e30, 3.3e38)
    for size in sizes:
        x_TK = (torch.linspace(-1, 1, 37)[None] * size).to(dtype)
        ours, theirs = level.quantize_rows(x_TK), ReferenceKernels().quantize_rows(x_TK)
        assert torch.equal(ours.scale_T1, theirs.scale_T1), size
        assert torch.equal(ours.q_TK, theirs.q_TK), size


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("column", [0, 15, 16, 36])
def test_what_is_not_finite_stays_so(typed: Typed, value: float, column: int) -> None:
    """A broken activation that the quantisation turns into a plausible number: nobody would ever notice."""
    kernels, dtype = typed
    x_TK = torch.ones(3, 37, dtype=dtype)
    x_TK[1, column] = value
    rows = kernels.quantize_rows(x_TK)
    assert rows.scale_T1.isfinite().flatten().tolist() == [True, False, True]
    packed = kernels.pack_int8(torch.randn(5, 37).to(dtype), None)
    result_TN = kernels.int8_matmul(rows, packed)
    assert not result_TN[1].isfinite().any() and result_TN[[0, 2]].isfinite().all()


def test_strided_rows_and_given_room(typed: Typed) -> None:
    """A row stride taken for the width, in the input or in the room for the result; a write between the rows."""
    kernels, dtype = typed
    torch.manual_seed(3)
    wide_TX = torch.full((9, 70), float("nan"), dtype=dtype)
    wide_TX[:, 11:48] = torch.randn(9, 37).to(dtype)
    plain = kernels.quantize_rows(wide_TX[:, 11:48].contiguous())
    room_TX = torch.full((9, 50), 99, dtype=torch.int8)
    out = QuantizedRows(room_TX[:, 5:42], torch.full_like(plain.scale_T1, float("nan")), dtype)
    rows = kernels.quantize_rows(wide_TX[:, 11:48], out=out)
    assert rows.q_TK.data_ptr() == out.q_TK.data_ptr()
    assert torch.equal(out.q_TK, plain.q_TK) and torch.equal(out.scale_T1, plain.scale_T1)
    assert (room_TX[:, :5] == 99).all() and (room_TX[:, 42:] == 99).all()
