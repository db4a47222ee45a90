"""Guards the linears of a layer in one call: the same numbers, bit for bit, as norm, quantisation and product alone.

T rows, E features, I intermediate, N outputs.
"""

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Typed
from tokenrouter.kernels import KernelSet, NativeKernels, Norm, PackedWeights, Product

PRODUCTS = list(Product)
WIDTHS = ((64, 96), (33, 50), (576, 192), (7, 3))  # whole tiles of k, and none


def pack(
    kernels: KernelSet, product: Product, weight_NK: Tensor, *, gated: bool = False
) -> PackedWeights:
    bias_N = weight_NK[:, 0].float().clone()
    if product is Product.DENSE:
        return kernels.pack_matmul(weight_NK, bias_N, gated=gated)
    return kernels.pack_int8(weight_NK, bias_N, gated=gated)


def rows_of(wide_TX: Tensor, width: int) -> Tensor:
    """Rows with a stride of their own."""
    return wide_TX[:, 5 : 5 + width]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 40])
def test_project_is_its_parts(
    typed: Typed, product: Product, widths: tuple[int, int], num_rows: int
) -> None:
    """A norm in another order, a row quantised before it is rounded, garbage of an earlier call in a tile's tail."""
    kernels, dtype = typed
    features, outputs = widths
    torch.manual_seed(num_rows)
    packed = pack(kernels, product, torch.randn(outputs, features).to(dtype))
    norm = Norm(torch.randn(features).to(dtype), 1e-5)
    x_TE = rows_of(torch.randn(num_rows, features + 9).to(dtype), features)
    before_TE = x_TE.clone()
    start_TN = torch.randn(num_rows, outputs).to(dtype)
    for with_norm in (norm, None):
        for accumulate in (False, True):
            wide_TX = torch.full((num_rows, outputs + 11), 7.0, dtype=dtype)
            out_TN = rows_of(wide_TX, outputs).copy_(start_TN)
            expected_TN = start_TN.clone()
            KernelSet.project(
                kernels,
                product,
                x_TE,
                packed,
                norm=with_norm,
                out=expected_TN,
                accumulate=accumulate,
            )
            got_TN = kernels.project(
                product, x_TE, packed, norm=with_norm, out=out_TN, accumulate=accumulate
            )
            assert got_TN is out_TN and torch.equal(out_TN, expected_TN)
            assert (wide_TX[:, :5] == 7).all() and (wide_TX[:, 5 + outputs :] == 7).all()
        new_TN = kernels.project(product, x_TE, packed, norm=with_norm)
        assert torch.equal(
            new_TN, KernelSet.project(kernels, product, x_TE, packed, norm=with_norm)
        )
    assert torch.equal(x_TE, before_TE)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("widths", WIDTHS)
def test_mlp_is_its_parts(typed: Typed, product: Product, widths: tuple[int, int]) -> None:
    """The residual normed after it was added to, or the work space of a larger call before it read as features."""
    kernels, dtype = typed
    features, inner = widths
    torch.manual_seed(inner)
    gate_up = pack(kernels, product, torch.randn(2 * inner, features).to(dtype), gated=True)
    down = pack(kernels, product, torch.randn(features, inner).to(dtype))
    norm = Norm(torch.randn(features).to(dtype), 1e-6)
    for num_rows in (40, 1, 0, 7):
        wide_TX = torch.randn(num_rows, features + 13).to(dtype)
        x_TE, outside_TX = rows_of(wide_TX, features), wide_TX.clone()
        expected_TE = x_TE.clone()
        KernelSet.mlp(kernels, product, expected_TE, norm, gate_up, down)
        kernels.mlp(product, x_TE, norm, gate_up, down)
        assert torch.equal(x_TE, expected_TE)
        rows_of(outside_TX, features).copy_(x_TE)
        assert torch.equal(wide_TX, outside_TX)


@pytest.mark.parametrize("product", PRODUCTS)
def test_infinities_of_one_call_do_not_reach_the_next(
    level: NativeKernels, product: Product
) -> None:
    """Work space is kept between calls: what a broken row left there times a padded zero is NaN."""
    torch.manual_seed(0)
    wide, narrow = torch.randn(16, 64).bfloat16(), torch.randn(16, 33).bfloat16()
    norms = [Norm(torch.ones(64).bfloat16(), 1e-5), Norm(torch.ones(33).bfloat16(), 1e-5)]
    packed = [pack(level, product, weight) for weight in (wide, narrow)]
    level.project(product, torch.full((4, 64), float("nan")).bfloat16(), packed[0], norm=norms[0])
    x_TE = torch.randn(4, 33).bfloat16()
    assert level.project(product, x_TE, packed[1], norm=norms[1]).isfinite().all()
    assert level.project(product, x_TE, packed[1]).isfinite().all()


@pytest.mark.parametrize("product", PRODUCTS)
def test_infinities_of_one_mlp_do_not_reach_the_next(
    level: NativeKernels, product: Product
) -> None:
    """The gated features of a wider model lie where a narrower one pads its own: NaN times a padded zero is NaN."""
    torch.manual_seed(0)
    norm = Norm(torch.ones(64).bfloat16(), 1e-5)
    wide, narrow = (
        (
            pack(level, product, torch.randn(2 * inner, 64).bfloat16(), gated=True),
            pack(level, product, torch.randn(64, inner).bfloat16()),
        )
        for inner in (100, 50)
    )
    broken_TE, x_TE = torch.full((8, 64), float("nan")).bfloat16(), torch.randn(4, 64).bfloat16()
    expected_TE = x_TE.clone()
    KernelSet.mlp(level, product, expected_TE, norm, *narrow)
    level.mlp(product, broken_TE, norm, *wide)
    level.mlp(product, x_TE, norm, *narrow)
    assert x_TE.isfinite().all() and torch.equal(x_TE, expected_TE)


def test_refusals(native: NativeKernels) -> None:
    """A read outside a norm's weight, or weights of a format that the rows cannot meet."""
    weight = torch.randn(8, 8).bfloat16()
    dense, int8 = native.pack_matmul(weight, None), native.pack_int8(weight, None)
    gated = native.pack_int8(torch.randn(16, 8).bfloat16(), None, gated=True)
    x_TE, norm = torch.randn(3, 8).bfloat16(), Norm(torch.ones(8).bfloat16(), 1e-5)
    short, float_norm = Norm(norm.weight_E[:7], 1e-5), Norm(torch.ones(8), 1e-5)
    for wrong in (short, float_norm):
        with pytest.raises(ValueError, match="norm"):
            native.project(Product.INT8, x_TE, int8, norm=wrong)
        with pytest.raises(ValueError, match="norm"):
            native.mlp(Product.INT8, x_TE, wrong, gated, int8)
    for product in PRODUCTS:
        wrong, found = (int8, "int8") if product is Product.DENSE else (dense, "dense")
        with pytest.raises(ValueError, match=f"^{product.value} was given {found} weights"):
            native.project(product, x_TE, wrong)
        with pytest.raises(ValueError, match=f"^{product.value} was given {found} weights"):
            native.mlp(product, x_TE, norm, gated, dense)
    with pytest.raises(ValueError, match="bfloat16 weights need bfloat16 rows"):
        native.project(Product.DENSE, x_TE.float(), dense)
    with pytest.raises(ValueError, match="rows"):
        native.project(Product.INT8, x_TE[:, :7], int8)
    with pytest.raises(ValueError, match="out"):
        native.project(Product.INT8, x_TE, int8, out=torch.empty(2, 8).bfloat16())
    for gate_up, down in (
        (int8, int8),
        (gated, native.pack_int8(weight[:, :7], None)),
    ):
        with pytest.raises(ValueError, match="gated weights of the same format"):
            native.mlp(Product.INT8, x_TE, norm, gate_up, down)
    narrow = native.pack_int8(weight[:7], None)
    with pytest.raises(ValueError, match="out"):
        native.mlp(Product.INT8, x_TE, norm, gated, narrow)
