"""Guards the linears of a layer in one call: the same numbers, bit for bit, as norm, quantisation and product alone.

T rows, E features, I intermediate, N outputs.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import NATIVE_DTYPES, Typed
from tokenrouter.executors.packing import packer
from tokenrouter.kernels import (
    KernelSet,
    NativeKernels,
    Norm,
    PackedWeights,
    Product,
    ReferenceKernels,
    TailWeights,
)

PRODUCTS = list(Product)
WIDTHS = ((64, 96), (33, 50), (576, 192), (7, 3))  # whole tiles of k, and none


def pack(
    kernels: KernelSet, product: Product, weight_NK: Tensor, *, gated: bool = False
) -> PackedWeights:
    bias_N = weight_NK[:, 0].float().clone()
    return packer(kernels, product)(weight_NK, bias_N, gated=gated)


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


def tail_weights(
    kernels: KernelSet, product: Product, features: int, inner: int, dtype: torch.dtype
) -> TailWeights:
    """Of a layer whose attention has 5 features more than the residual stream, and the next one's of 11 more."""
    return TailWeights(
        out=pack(kernels, product, torch.randn(features, features + 5).to(dtype)),
        norm=Norm(torch.randn(features).to(dtype), 1e-6),
        gate_up=pack(kernels, product, torch.randn(2 * inner, features).to(dtype), gated=True),
        down=pack(kernels, product, torch.randn(features, inner).to(dtype)),
        next_norm=Norm(torch.randn(features).to(dtype), 1e-3),
        next_qkv=pack(kernels, product, torch.randn(features + 11, features).to(dtype)),
    )


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("widths", WIDTHS)
def test_a_layers_tail_is_its_parts(
    typed: Typed, product: Product, widths: tuple[int, int]
) -> None:
    """The next projection of the stream before the MLP, by this layer's norm, or over rows that are read later."""
    kernels, dtype = typed
    features, inner = widths
    torch.manual_seed(inner)
    weights = tail_weights(kernels, product, features, inner, dtype)
    tail = kernels.layer_tail(product, weights)
    for num_rows in (40, 1, 0, 7):
        heads_TA = rows_of(torch.randn(num_rows, features + 14).to(dtype), features + 5)
        wide_TX = torch.randn(num_rows, features + 13).to(dtype)
        x_TE, outside_TX = rows_of(wide_TX, features), wide_TX.clone()
        expected_TE, before_TA = x_TE.clone(), heads_TA.clone()
        KernelSet.layer_tail(kernels, product, weights)(heads_TA, expected_TE, None)
        expected_TO = kernels.project(
            product, expected_TE, weights.next_qkv, norm=weights.next_norm
        )
        wide_TY = torch.full((num_rows, features + 30), 7.0, dtype=dtype)
        tail(heads_TA, x_TE, rows_of(wide_TY, features + 11))
        assert torch.equal(x_TE, expected_TE) and torch.equal(heads_TA, before_TA)
        assert torch.equal(rows_of(wide_TY, features + 11), expected_TO)
        assert (wide_TY[:, :5] == 7).all() and (wide_TY[:, 16 + features :] == 7).all()
        rows_of(outside_TX, features).copy_(x_TE)
        assert torch.equal(wide_TX, outside_TX)
        x_TE.copy_(1)
        expected_TE.fill_(1)
        KernelSet.layer_tail(kernels, product, weights)(heads_TA, expected_TE, None)
        tail(heads_TA, x_TE, None)
        assert torch.equal(x_TE, expected_TE)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_threads_change_no_bit_of_a_layer(
    level: NativeKernels, product: Product, dtype: torch.dtype
) -> None:
    """Rows in shared work space written by two threads, or sums that are divided by thread."""
    torch.manual_seed(3)
    tail = level.layer_tail(product, tail_weights(level, product, 96, 130, dtype))
    heads_TA, start_TE = torch.randn(67, 101).to(dtype), torch.randn(67, 96).to(dtype)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        x_TE, qkv_TO = start_TE.clone(), torch.zeros(67, 107).to(dtype)
        tail(heads_TA, x_TE, qkv_TO)
        results.append((x_TE, qkv_TO))
    for x_TE, qkv_TO in results[1:]:
        assert torch.equal(x_TE, results[0][0]) and torch.equal(qkv_TO, results[0][1])


def test_a_refused_tail_writes_nothing(native: NativeKernels) -> None:
    """The last of its arguments checked after the first product has changed the residual stream."""
    weights = tail_weights(native, Product.INT8, 32, 48, torch.bfloat16)
    tail = native.layer_tail(Product.INT8, weights)
    heads_TA, x_TE = torch.randn(3, 37).bfloat16(), torch.randn(3, 32).bfloat16()
    before_TE, qkv_TO = x_TE.clone(), torch.zeros(3, 43).bfloat16()
    wrong: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {
        "rows must have shape": (heads_TA[:, :36], x_TE, qkv_TO),
        "out must have shape": (heads_TA[:2], x_TE, qkv_TO),
        "heads must be": (heads_TA.float(), x_TE, qkv_TO),
        "qkv must be": (heads_TA, x_TE, qkv_TO.float()),
        r"out must have shape \[3, 43\]": (heads_TA, x_TE, qkv_TO[:, :42]),
    }
    for message, arguments in wrong.items():
        with pytest.raises(ValueError, match=message):
            tail(*arguments)
        assert torch.equal(x_TE, before_TE), message
    last = replace(weights, next_norm=None, next_qkv=None)
    for kernels in (native, ReferenceKernels()):
        if isinstance(kernels, ReferenceKernels):
            last = replace(
                tail_weights(kernels, Product.INT8, 32, 48, torch.bfloat16),
                next_norm=None,
                next_qkv=None,
            )
        with pytest.raises(ValueError, match="no next layer"):
            kernels.layer_tail(Product.INT8, last)(heads_TA, x_TE, qkv_TO)
        assert torch.equal(x_TE, before_TE)
    with pytest.raises(ValueError, match="different hidden sizes"):
        native.layer_tail(Product.INT8, replace(weights, out=weights.next_qkv))
    for product in (Product.DENSE, Product.INT4):
        with pytest.raises(ValueError, match="was given int8 weights"):
            native.layer_tail(product, weights)


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
def test_infinities_of_one_layer_do_not_reach_the_next(
    level: NativeKernels, product: Product
) -> None:
    """The gated features of a wider model lie where a narrower one pads its own: NaN times a padded zero is NaN."""
    torch.manual_seed(0)
    wide, narrow = (tail_weights(level, product, 64, n, torch.bfloat16) for n in (100, 50))
    broken_TE, x_TE = torch.full((8, 64), float("nan")).bfloat16(), torch.randn(4, 64).bfloat16()
    heads_TA = torch.randn(8, 69).bfloat16()
    level.layer_tail(product, wide)(heads_TA, broken_TE, broken_TE.new_empty(8, 75))
    level.layer_tail(product, narrow)(heads_TA[:4], x_TE, None)
    assert broken_TE.isnan().all() and x_TE.isfinite().all()


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
    for product in PRODUCTS:
        wrong, found = (int8, "int8") if product is Product.DENSE else (dense, "dense")
        with pytest.raises(ValueError, match=f"^{product.value} was given {found} weights"):
            native.project(product, x_TE, wrong)
    with pytest.raises(ValueError, match="bfloat16 weights need bfloat16 rows"):
        native.project(Product.DENSE, x_TE.float(), dense)
    with pytest.raises(ValueError, match="rows"):
        native.project(Product.INT8, x_TE[:, :7], int8)
    with pytest.raises(ValueError, match="out"):
        native.project(Product.INT8, x_TE, int8, out=torch.empty(2, 8).bfloat16())
    weights = tail_weights(native, Product.INT8, 8, 8, torch.bfloat16)
    for change in (
        {"gate_up": int8},
        {"gate_up": gated, "down": native.pack_int8(weight[:, :7], None)},
    ):
        with pytest.raises(ValueError, match="gated weights of the same format"):
            native.layer_tail(Product.INT8, replace(weights, **change))
    for wrong in (short, float_norm):
        for change in ({"norm": wrong}, {"next_norm": wrong}):
            tail = native.layer_tail(Product.INT8, replace(weights, **change))
            with pytest.raises(ValueError, match="norm"):
                tail(torch.randn(3, 13).bfloat16(), x_TE, x_TE.new_empty(3, 19))
