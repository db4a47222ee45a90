"""Guards products whose weights are gate and up: ``silu(gate) * up`` of the product, with every option of a product.

T rows, K inputs, I outputs, J = 2 I gate and up.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from tests.kernels.conftest import NATIVE_DTYPES, Typed
from tests.kernels.test_products import PRODUCTS, Product, expected, tolerance
from tokenrouter.kernels import KernelSet, NativeKernels, PackedWeights, ReferenceKernels


def made(
    kernels: KernelSet, name: str, weight_JK: Tensor, bias_J: Tensor | None
) -> tuple[Product, PackedWeights]:
    """The gated product called ``name`` as a function of plain rows, and its weights."""
    if name == "matmul":
        packed = kernels.pack_matmul(weight_JK, bias_J, gated=True)
        return lambda x_TK, **options: kernels.matmul(x_TK, packed, **options), packed
    if name == "int4_matmul":
        codes = kernels.pack_int4(weight_JK, bias_J, gated=True)
        return (
            lambda x_TK, **options: kernels.int4_matmul(
                kernels.quantize_rows(x_TK), codes, **options
            )
        ), codes
    packed = kernels.pack_int8(weight_JK, bias_J, gated=True)
    if name == "int8_weight_matmul":
        return lambda x_TK, **options: kernels.int8_weight_matmul(x_TK, packed, **options), packed

    def int8(x_TK: Tensor, **options: object) -> Tensor:
        return kernels.int8_matmul(kernels.quantize_rows(x_TK), packed, **options)  # type: ignore[arg-type]

    return int8, packed


@pytest.mark.parametrize(
    ("name", "width"),
    [
        *((name, width) for name in PRODUCTS[:3] for width in (1, 15, 16, 17, 48, 97, 192)),
        *(("int4_matmul", width) for width in (1, 17, 97)),  # int8, once they are expanded
    ],
)
@pytest.mark.parametrize(("num_rows", "num_in"), [(1, 51), (19, 64), (33, 130)])
def test_equals_the_formula(
    typed: Typed, name: str, width: int, num_rows: int, num_in: int
) -> None:
    """Gate and up interleaved wrongly at a width that is no whole block, or their scales and biases are not."""
    kernels, dtype = typed
    torch.manual_seed(width)
    weight_JK = (torch.randn(2 * width, num_in) * num_in**-0.5).to(dtype)
    bias_J, x_TK = torch.randn(2 * width).to(dtype), torch.randn(num_rows, num_in).to(dtype)
    start_TI = torch.randn(num_rows, width).to(dtype)
    for bias in (None, bias_J):
        gate_TI, up_TI = expected(name, x_TK, weight_JK, bias).chunk(2, dim=1)
        y_TI = F.silu(gate_TI) * up_TI
        product, _ = made(kernels, name, weight_JK, bias)
        atol = 4 * tolerance(name, dtype) * float(y_TI.abs().max() + 1)
        fresh_TI = product(x_TK)
        assert fresh_TI.shape == (num_rows, width) and fresh_TI.dtype == dtype
        assert_close(fresh_TI.double(), y_TI, rtol=0, atol=atol)
        room_TX = torch.full((num_rows, width + 40), float("nan"), dtype=dtype)
        assert torch.equal(product(x_TK, out=room_TX[:, 3 : 3 + width]), fresh_TI)
        assert room_TX[:, :3].isnan().all() and room_TX[:, 3 + width :].isnan().all()
        sum_TI = product(x_TK, out=start_TI.clone(), accumulate=True)
        assert_close(sum_TI.double(), start_TI.double() + y_TI, rtol=0, atol=2 * atol)


@pytest.mark.parametrize("name", PRODUCTS)
def test_large_gates(typed: Typed, name: str) -> None:
    """exp of a large negative gate is infinite: 0 * inf; of a large one the gate itself remains."""
    kernels, dtype = typed
    weight_JK = torch.ones(4, 8).to(dtype)
    product, _ = made(kernels, name, weight_JK, None)
    x_TK = torch.full((2, 8), 25.0).to(dtype)
    x_TK[1] *= -1
    y_TI = product(x_TK)
    assert_close(y_TI[0].float(), torch.full((2,), 40_000.0), rtol=0.01, atol=0)
    assert (y_TI[1].abs() < 1e-6).all()


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_a_token_has_the_same_bits_in_any_batch(kernels: KernelSet, dtype: torch.dtype) -> None:
    """The int8 path's promise holds for its gated product too."""
    torch.manual_seed(1)
    product, _ = made(kernels, "int8_matmul", torch.randn(2 * 97, 83).to(dtype), None)
    x_TK = torch.randn(70, 83).to(dtype)
    alone_TI = torch.cat([product(x_TK[t : t + 1]) for t in range(70)])
    for size in (2, 3, 16, 17, 33, 70):
        assert torch.equal(product(x_TK[:size]), alone_TI[:size]), f"{size} rows"


@pytest.mark.parametrize("name", PRODUCTS)
def test_threads_change_no_bit(level: NativeKernels, name: str) -> None:
    """Panels are divided among threads."""
    torch.manual_seed(2)
    product, _ = made(level, name, torch.randn(2 * 577, 257).bfloat16(), None)
    x_TK, results = torch.randn(37, 257).bfloat16(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(product(x_TK))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("shared", [False, True])
def test_routed(kernels: KernelSet, dtype: torch.dtype, shared: bool) -> None:
    """One path gated and the other not, or rows of one with the weights of the other."""
    torch.manual_seed(3)
    weights = torch.randn(2, 2 * 33, 83).to(dtype) * 83**-0.5
    high_TK, low_TK = torch.randn(9, 83).to(dtype), torch.randn(7, 83).to(dtype)
    low, low_packed = made(kernels, "int8_matmul", weights[1], None)
    name = "int8_weight_matmul" if shared else "matmul"
    high, high_packed = made(kernels, name, weights[int(shared)], None)
    high_packed = low_packed if shared else high_packed
    rows = kernels.quantize_rows(low_TK)
    out_TI = torch.full((16, 33), float("nan"), dtype=dtype)
    kernels.routed_matmul(high_TK, high_packed, rows, low_packed, out=out_TI)
    assert torch.equal(out_TI[9:], low(low_TK))
    assert_close(out_TI[:9], high(high_TK), rtol=2 * tolerance(name, dtype), atol=0.01)


def test_an_odd_number_of_rows_is_refused(native: NativeKernels) -> None:
    """Gate and up of different widths: what lies in the last row belongs to neither."""
    for kernels in (native, ReferenceKernels()):
        for pack in (kernels.pack_matmul, kernels.pack_int8, kernels.pack_int4):
            with pytest.raises(ValueError, match=r"gated.*even.*7"):
                pack(torch.ones(7, 4).bfloat16(), None, gated=True)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_wrong_low_weights_leave_the_result_alone(kernels: KernelSet, dtype: torch.dtype) -> None:
    """The high rows were written before the low ones' weights were refused."""
    weight_NK, x_TK = torch.randn(32, 64).to(dtype), torch.randn(5, 64).to(dtype)
    dense, out_TN = kernels.pack_matmul(weight_NK, None), torch.zeros(10, 32, dtype=dtype)
    with pytest.raises(ValueError, match="int8_matmul was given"):
        kernels.routed_matmul(x_TK, dense, kernels.quantize_rows(x_TK), dense, out=out_TN)
    assert (out_TN == 0).all()
