"""Guards the int8 product: exact accumulation, scales in the right place, the same bits in any batch and everywhere."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.kernels.conftest import LEVELS
from tokenrouter.kernels import KernelSet, NativeKernels, QuantizedRows, ReferenceKernels

SIZES = (1, 2, 3, 5, 15, 16, 17, 31, 33, 64, 100, 255, 300)


def quantized_weight(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric per output channel, from its definition: int8 [N, K] and float32 scales [N]."""
    scale_N = weight_NK.float().abs().amax(1) / 127.0
    q_NK = (weight_NK.float() / scale_N.clamp_min(1e-30)[:, None]).round().to(torch.int8)
    return q_NK, scale_N


def exact(rows: QuantizedRows, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """The product in 64-bit integers, dequantised in double."""
    q_NK, scale_N = quantized_weight(weight_NK)
    sums_TN = rows.q_TK.long() @ q_NK.long().t()
    result_TN = sums_TN.double() * scale_N.double() * rows.scale_T1.double()
    return result_TN if bias_N is None else result_TN + bias_N.double()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("num_out", "num_in"),
    [(48, 32), (576, 1536), (97, 51), (1, 8), (33, 2), (31, 129), (7, 5000), (160, 576)],
)
@pytest.mark.parametrize("num_rows", [1, 4, 40])
def test_equals_64_bit_integers(
    kernels: KernelSet, num_rows: int, num_out: int, num_in: int, with_bias: bool
) -> None:
    """A product that saturates, drops an odd remainder of rows or columns, or misplaces a scale."""
    torch.manual_seed(num_rows)
    weight_NK = torch.randn(num_out, num_in) * torch.logspace(-2, 1, num_out)[:, None]
    bias_N = torch.randn(num_out) if with_bias else None
    rows = kernels.quantize_rows(torch.randn(num_rows, num_in) * 5)
    expected_TN = exact(rows, weight_NK, bias_N)
    atol = 1e-6 * float(expected_TN.abs().max())
    result_TN = kernels.int8_matmul(rows, kernels.pack_int8(weight_NK, bias_N))
    assert result_TN.dtype == torch.float32 and result_TN.shape == (num_rows, num_out)
    assert_close(result_TN.double(), expected_TN, rtol=3e-7, atol=atol)


@pytest.mark.parametrize("signs", ["equal", "opposite", "alternating"])
@pytest.mark.parametrize("num_in", [2, 64, 1536, 5000])
def test_extreme_values_do_not_saturate(kernels: KernelSet, num_in: int, signs: str) -> None:
    """Products of 127 by 127 added in 16 bits, as without VNNI; an offset of unsigned rows that is not taken out."""
    sign_K = torch.ones(num_in)
    if signs == "opposite":
        sign_K = -sign_K
    elif signs == "alternating":
        sign_K[1::2] = -1
    weight_NK = sign_K.expand(64, num_in).clone()
    weight_NK[::2] *= -1
    x_TK = torch.ones(9, num_in)
    x_TK[::2] *= -1
    packed, rows = kernels.pack_int8(weight_NK, None), kernels.quantize_rows(x_TK)
    assert (rows.q_TK.abs() == 127).all()
    result_TN = kernels.int8_matmul(rows, packed)
    assert_close(result_TN, x_TK @ weight_NK.t(), rtol=1e-6, atol=0)
    top_TN = kernels.int8_matmul(kernels.quantize_rows(x_TK * sign_K), packed)
    assert_close(top_TN.abs(), torch.full((9, 64), float(num_in)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_result_has_the_dtype_of_the_rows(dtype: torch.dtype) -> None:
    """Sums in half precision: the error grows with K; two roundings of the scaled sum are allowed."""
    torch.manual_seed(4)
    kernels = ReferenceKernels()
    weight_NK = torch.randn(64, 128).to(dtype)
    rows = kernels.quantize_rows(torch.randn(20, 128).to(dtype))
    expected_TN = exact(rows, weight_NK, None)
    result_TN = kernels.int8_matmul(rows, kernels.pack_int8(weight_NK, None))
    assert result_TN.dtype == dtype
    rounding = 1.01 * torch.finfo(dtype).eps + 3e-7
    assert_close(result_TN.double(), expected_TN, rtol=rounding, atol=1e-5)


def test_bfloat16_rows_give_bfloat16(level: NativeKernels) -> None:
    """The same of the native product."""
    torch.manual_seed(4)
    weight_NK = torch.randn(64, 128).bfloat16()
    rows = level.quantize_rows(torch.randn(20, 128).bfloat16())
    result_TN = level.int8_matmul(rows, level.pack_int8(weight_NK, None))
    assert result_TN.dtype == torch.bfloat16
    rounding = 1.01 * torch.finfo(torch.bfloat16).eps + 3e-7
    expected_TN = exact(rows, weight_NK, None)
    assert_close(result_TN.double(), expected_TN, rtol=rounding, atol=1e-5)


def test_large_sums_of_small_rows_in_float16() -> None:
    """The result, 15.4, is an ordinary number; an intermediate of 195,072 is not."""
    kernels = ReferenceKernels()
    weight_NK, x_TK = torch.ones(16, 1536).half(), torch.full((2, 1536), 0.01).half()
    result_TN = kernels.int8_matmul(kernels.quantize_rows(x_TK), kernels.pack_int8(weight_NK, None))
    assert_close(result_TN, torch.full((2, 16), 15.36).half(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_out", "num_in"), [(192, 64), (1536, 576), (576, 1536), (67, 83), (40, 5000)]
)
def test_a_token_has_the_same_bits_in_any_batch(
    kernels: KernelSet, dtype: torch.dtype, num_out: int, num_in: int
) -> None:
    """Another kernel, or another order of sums, for another number of rows."""
    torch.manual_seed(5)
    weight_NK, bias_N = torch.randn(num_out, num_in).to(dtype), torch.randn(num_out).to(dtype)
    sizes = SIZES[:6] if kernels.name == "triton" else SIZES  # tiles go by in an interpreter
    rows = kernels.quantize_rows(torch.randn(max(sizes), num_in).to(dtype))
    packed = kernels.pack_int8(weight_NK, bias_N)

    def product(part: slice) -> Tensor:
        part_rows = QuantizedRows(rows.q_TK[part], rows.scale_T1[part], dtype)
        return kernels.int8_matmul(part_rows, packed)

    alone_TN = torch.cat([product(slice(t, t + 1)) for t in range(9)])
    for size in sizes:
        assert torch.equal(product(slice(0, size))[:9], alone_TN[: min(size, 9)]), f"{size} rows"
    last = max(sizes) - 1
    assert torch.equal(product(slice(0, last + 1))[last:], product(slice(last, last + 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulate", [False, True])
def test_every_processor_and_thread_count_gives_the_same_bits(
    native: NativeKernels, dtype: torch.dtype, accumulate: bool
) -> None:
    """A result that depends on the machine, so that a cached decision or a table cannot be repeated elsewhere."""
    torch.manual_seed(6)
    for num_rows, num_out, num_in in ((1, 576, 576), (37, 97, 51), (130, 192, 1536), (3, 33, 5000)):
        weight_NK, bias_N = torch.randn(num_out, num_in).to(dtype), torch.randn(num_out).to(dtype)
        x_TK, start_TN = torch.randn(num_rows, num_in), torch.randn(num_rows, num_out).to(dtype)
        results = []
        for name in LEVELS:
            native.limit_isa(name)
            packed = native.pack_int8(weight_NK, bias_N)
            rows = native.quantize_rows(x_TK.to(dtype))
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                out_TN = start_TN.clone()
                native.int8_matmul(rows, packed, out=out_TN, accumulate=accumulate)
                results.append((f"{name} with {threads} threads", out_TN))
        for where, result_TN in results:
            assert torch.equal(result_TN, results[0][1]), where


def test_zero_rows_and_zero_channels(kernels: KernelSet) -> None:
    """A dead channel or an all-zero token gives NaN."""
    weight_NK = torch.randn(16, 32)
    weight_NK[5] = 0
    bias_N = torch.arange(16.0)
    x_TK = torch.randn(4, 32)
    x_TK[2] = 0
    rows = kernels.quantize_rows(x_TK)
    result_TN = kernels.int8_matmul(rows, kernels.pack_int8(weight_NK, bias_N))
    assert result_TN.isfinite().all()
    assert torch.equal(result_TN[2], bias_N)
    assert torch.equal(result_TN[:, 5], torch.full((4,), 5.0))


def test_no_tokens(kernels: KernelSet) -> None:
    """A slice without tokens is refused by the library underneath."""
    packed = kernels.pack_int8(torch.randn(24, 16), torch.randn(24))
    rows = kernels.quantize_rows(torch.zeros(0, 16))
    assert kernels.int8_matmul(rows, packed).shape == (0, 24)


def test_packing_leaves_the_weights_alone(kernels: KernelSet) -> None:
    """In-place rounding of weights that the high path shares; packed weights that follow them when they change."""
    weight_NK, bias_N = torch.randn(24, 16), torch.randn(24)
    copies = weight_NK.clone(), bias_N.clone()
    packed = kernels.pack_int8(weight_NK, bias_N)
    rows = kernels.quantize_rows(torch.randn(3, 16))
    kernels.int8_matmul(rows, packed)
    assert torch.equal(weight_NK, copies[0]) and torch.equal(bias_N, copies[1])
