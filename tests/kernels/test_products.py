"""Guards what all products share: bias, ``out``, ``accumulate``, strided rows, threads; and the two products on top.

T rows, K inputs, N outputs.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.kernels.conftest import NATIVE_DTYPES, Typed
from tokenrouter.kernels import KernelSet, NativeKernels, QuantizedRows, ReferenceKernels
from tokenrouter.kernels.int4_matmul.reference import expand, quantize_weight

PRODUCTS = ("matmul", "int8_matmul", "int8_weight_matmul", "int4_matmul")
SHAPES = ((1, 1, 2), (2, 33, 31), (5, 97, 51), (17, 64, 130), (67, 131, 257), (1, 576, 1536))
Product = Callable[..., Tensor]


def made(
    kernels: KernelSet, name: str, weight_NK: Tensor, bias_N: Tensor | None
) -> Callable[..., Tensor]:
    """The product called ``name`` with packed weights, as a function of plain rows."""
    if name == "matmul":
        packed = kernels.pack_matmul(weight_NK, bias_N)
        return lambda x_TK, **options: kernels.matmul(x_TK, packed, **options)
    if name == "int4_matmul":
        codes = kernels.pack_int4(weight_NK, bias_N)
        return lambda x_TK, **options: kernels.int4_matmul(
            kernels.quantize_rows(x_TK), codes, **options
        )
    packed = kernels.pack_int8(weight_NK, bias_N)
    if name == "int8_weight_matmul":
        return lambda x_TK, **options: kernels.int8_weight_matmul(x_TK, packed, **options)
    return lambda x_TK, **options: kernels.int8_matmul(
        kernels.quantize_rows(x_TK), packed, **options
    )


def dequantised(name: str, weight_NK: Tensor) -> Tensor:
    """What int8 per output channel makes of the weights, in double; rounded in float32, where a tie may fall.

    For 4 bits the codes are the reference's, which ``test_int4_matmul`` checks.
    """
    if name == "int4_matmul":
        codes = quantize_weight(weight_NK)
        return expand(codes, weight_NK.shape[1]).double() * codes.scale_N.double()[:, None]
    wide_NK = weight_NK.float()
    scale_N1 = wide_NK.abs().amax(1, keepdim=True) / 127
    return (wide_NK / scale_N1).round().double() * scale_N1.double()


def tolerance(name: str, dtype: torch.dtype) -> float:
    """Relative to the largest output. The native W8A16 product takes 16 bits of a row's largest magnitude."""
    if dtype == torch.float32:
        return 2**-13 if name == "int8_weight_matmul" else 2**-17
    return 2**-9 if dtype == torch.float16 else 2**-7


def expected(name: str, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    if name in ("int8_matmul", "int4_matmul"):
        rows = ReferenceKernels().quantize_rows(x_TK)
        x_TK = rows.q_TK.double() * rows.scale_T1.double()
    weight_NK = weight_NK.double() if name == "matmul" else dequantised(name, weight_NK)
    y_TN = x_TK.double() @ weight_NK.t()
    return y_TN if bias_N is None else y_TN + bias_N.double()


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bias_and_accumulate(typed: Typed, name: str, shape: tuple[int, int, int]) -> None:
    """A bias that is scaled with the sum, added twice, or not when accumulating; an ``out`` that is overwritten."""
    (kernels, dtype), (num_rows, num_out, num_in) = typed, shape
    torch.manual_seed(num_rows)
    weight_NK, bias_N = torch.randn(num_out, num_in).to(dtype), torch.randn(num_out).to(dtype)
    x_TK = torch.randn(num_rows, num_in).to(dtype)
    start_TN = torch.randn(num_rows, num_out).to(dtype)
    for bias in (None, bias_N):
        product = made(kernels, name, weight_NK, bias)
        y_TN = expected(name, x_TK, weight_NK, bias)
        atol = tolerance(name, dtype) * float(y_TN.abs().max() + 1)
        fresh_TN = product(x_TK)
        assert fresh_TN.dtype == dtype and fresh_TN.shape == (num_rows, num_out)
        assert_close(fresh_TN.double(), y_TN, rtol=tolerance(name, dtype), atol=atol)
        out_TN = torch.full((num_rows, num_out), float("nan"), dtype=dtype)
        assert product(x_TK, out=out_TN) is out_TN and torch.equal(out_TN, fresh_TN)
        sum_TN = start_TN.clone()
        assert product(x_TK, out=sum_TN, accumulate=True) is sum_TN
        assert_close(sum_TN.double(), start_TN.double() + y_TN, rtol=0, atol=2 * atol)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("num_in", [33, 64, 96])
def test_strided_rows_in_and_out(typed: Typed, name: str, num_in: int) -> None:
    """A stride taken for the width; reading the NaN or writing between the rows, where other features lie."""
    kernels, dtype = typed
    torch.manual_seed(7)
    weight_NK, x_TK = torch.randn(45, num_in).to(dtype), torch.randn(19, num_in).to(dtype)
    product = made(kernels, name, weight_NK, torch.randn(45).to(dtype))
    wide_TX = torch.full((19, num_in + 70), float("nan"), dtype=dtype)
    wide_TX[:, 5 : 5 + num_in] = x_TK
    room_TX = torch.full((19, 90), float("nan"), dtype=dtype)
    product(wide_TX[:, 5 : 5 + num_in], out=room_TX[:, 20:65])
    atol = tolerance(name, dtype) * 40
    assert_close(room_TX[:, 20:65], product(x_TK), rtol=0, atol=atol)
    assert room_TX[:, :20].isnan().all() and room_TX[:, 65:].isnan().all()


@pytest.mark.parametrize("name", PRODUCTS)
def test_no_rows(typed: Typed, name: str) -> None:
    """An empty slice, with an ``out`` that has a place in memory and no element."""
    kernels, dtype = typed
    product = made(kernels, name, torch.randn(24, 16).to(dtype), torch.randn(24).to(dtype))
    out_TN = torch.zeros(5, 24, dtype=dtype)
    for accumulate in (False, True):
        x_TK = torch.zeros(0, 16, dtype=dtype)
        assert product(x_TK, out=out_TN[2:2], accumulate=accumulate).shape == (0, 24)
    assert not out_TN.any()


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_slice_that_starts_at_an_odd_address(typed: Typed, name: str) -> None:
    """Rows, weights and outputs that lie on no boundary of 64, 16 or 4 bytes: an aligned load faults."""
    kernels, dtype = typed
    torch.manual_seed(8)
    flat = torch.randn(1 + 7 * 40 + 50 * 40).to(dtype)
    x_TK, weight_NK = flat[1:281].view(7, 40), flat[281:].view(50, 40)
    room = torch.full((1 + 7 * 50,), float("nan"), dtype=dtype)
    out_TN = made(kernels, name, weight_NK, None)(x_TK, out=room[1:].view(7, 50))
    y_TN = expected(name, x_TK, weight_NK, None)
    atol = tolerance(name, dtype) * float(y_TN.abs().max())
    assert_close(out_TN.double(), y_TN, rtol=tolerance(name, dtype), atol=atol)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize(("num_high", "num_low"), [(0, 0), (0, 5), (5, 0), (1, 1), (17, 40)])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_routed_matmul(
    kernels: KernelSet,
    dtype: torch.dtype,
    num_high: int,
    num_low: int,
    shared: bool,
    accumulate: bool,
) -> None:
    """Rows of one path with the weights of the other, a bias from the wrong one, rows in the wrong place."""
    torch.manual_seed(9)
    weights = torch.randn(2, 61, 83).to(dtype)
    biases = torch.randn(2, 61).to(dtype)
    low_packed = kernels.pack_int8(weights[1], biases[1])
    high = low_packed if shared else kernels.pack_matmul(weights[0], biases[0])
    high_TK, low_TK = torch.randn(num_high, 83).to(dtype), torch.randn(num_low, 83).to(dtype)
    rows = kernels.quantize_rows(low_TK)
    start_TN = torch.randn(num_high + num_low, 61).to(dtype)
    out_TN = start_TN.clone()
    alone = kernels.int8_weight_matmul if shared else kernels.matmul
    expected_TN = start_TN.clone()
    alone(high_TK, high, out=expected_TN[:num_high], accumulate=accumulate)
    kernels.int8_matmul(rows, low_packed, out=expected_TN[num_high:], accumulate=accumulate)
    result_TN = kernels.routed_matmul(
        high_TK, high, rows, low_packed, out=out_TN, accumulate=accumulate
    )
    assert result_TN is out_TN
    assert torch.equal(out_TN[num_high:], expected_TN[num_high:]), "low rows must be bit-equal"
    assert_close(out_TN, expected_TN, rtol=2 * tolerance("matmul", dtype), atol=0.01)


@pytest.mark.parametrize("name", ["matmul", "int8_weight_matmul"])
def test_threads_change_no_bit(level: NativeKernels, name: str) -> None:
    """A sum split over threads: an output that depends on the machine's load or size."""
    torch.manual_seed(10)
    for num_rows, num_out, num_in in ((1, 576, 1536), (37, 97, 51), (70, 193, 577)):
        weight_NK = torch.randn(num_out, num_in).bfloat16()
        product = made(level, name, weight_NK, None)
        x_TK, results = torch.randn(num_rows, num_in).bfloat16(), []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(product(x_TK))
        assert all(torch.equal(result, results[0]) for result in results)


def test_threads_change_no_bit_of_a_routed_step(level: NativeKernels) -> None:
    """Two products in one pass whose work is divided among threads."""
    torch.manual_seed(11)
    weight_NK, x_TK = torch.randn(193, 257).bfloat16(), torch.randn(40, 257).bfloat16()
    packed, rows = level.pack_int8(weight_NK, None), level.quantize_rows(x_TK[21:])
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out_TN = torch.empty(40, 193, dtype=torch.bfloat16)
        results.append(level.routed_matmul(x_TK[:21], packed, rows, packed, out=out_TN))
    assert all(torch.equal(result, results[0]) for result in results)


def test_nan_stays_in_its_row(typed: Typed) -> None:
    """Blocks of rows in which one broken token spoils its neighbours, or is cleaned by a zero beyond K."""
    kernels, dtype = typed
    for name in PRODUCTS:
        x_TK = torch.randn(9, 37).to(dtype)
        x_TK[4, 36] = float("nan")
        y_TN = made(kernels, name, torch.randn(20, 37).to(dtype), None)(x_TK)
        assert y_TN[4].isnan().all(), name
        assert torch.cat((y_TN[:4], y_TN[5:])).isfinite().all(), name


def test_rows_may_come_from_a_kept_buffer(typed: Typed) -> None:
    """Executors quantise into views of buffers that are larger: scales and rows of an earlier step beyond them."""
    kernels, dtype = typed
    packed = kernels.pack_int8(torch.randn(20, 40).to(dtype), None)
    room = QuantizedRows.empty(30, 40, dtype)
    room.q_TK.fill_(111), room.scale_T1.fill_(float("nan"))
    x_TK = torch.randn(7, 40).to(dtype)
    part = QuantizedRows(room.q_TK[:7], room.scale_T1[:7], dtype)
    assert kernels.quantize_rows(x_TK, out=part) is part
    expected_TN = kernels.int8_matmul(kernels.quantize_rows(x_TK), packed)
    assert torch.equal(kernels.int8_matmul(part, packed), expected_TN)
    assert (room.q_TK[7:] == 111).all() and room.scale_T1[7:].isnan().all()
