"""Guards that both backends refuse the same arguments in the same way, and that sizes of zero are alike.

T rows, K inputs, N outputs.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.kernels.conftest import Typed
from tests.kernels.test_router_mlp import TABLE, TOKENS
from tokenrouter.executors.packing import packer
from tokenrouter.kernels import (
    Cut,
    KernelSet,
    NativeKernels,
    Product,
    QuantizedRows,
    ReferenceKernels,
)
from tokenrouter.kernels.checks import MAX_INT8_INPUTS

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=["reference", "native"])
def either(request: pytest.FixtureRequest, native: NativeKernels) -> KernelSet:
    """Each backend, the native one on the best instruction set: what is refused does not depend on it."""
    return native if request.param == "native" else ReferenceKernels()


def int8_rows(num_rows: int, width: int, dtype: torch.dtype = torch.float32) -> QuantizedRows:
    rows = QuantizedRows.empty(num_rows, width, dtype)
    rows.q_TK.fill_(1)
    rows.scale_T1.fill_(1)
    return rows


def multiply(
    kernels: KernelSet, product: Product, x_TK: torch.Tensor, packed: Any, **options: Any
) -> torch.Tensor:
    """The bare operator of ``product``."""
    operator = getattr(kernels, product.value)
    if product.quantizes_rows:
        rows = int8_rows(x_TK.shape[0], x_TK.shape[1], x_TK.dtype)
        return operator(rows, packed, **options)
    return operator(x_TK, packed, **options)


def pack(kernels: KernelSet, product: Product, weight_NK: torch.Tensor) -> Any:
    return packer(kernels, product)(weight_NK, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("product", Product)
def test_nothing_to_accumulate_onto(
    either: KernelSet, product: Product, dtype: torch.dtype
) -> None:
    """A sum onto memory that nobody has written, or a sum that is silently none."""
    x_TK = torch.ones(3, 64, dtype=dtype)
    packed = pack(either, product, torch.ones(5, 64, dtype=dtype))
    for call in (
        lambda **o: multiply(either, product, x_TK, packed, **o),
        lambda **o: either.project(product, x_TK, packed, **o),
    ):
        with pytest.raises(ValueError, match="accumulate=True adds to out"):
            call(accumulate=True)
        out_TN = torch.full((3, 5), 2.0, dtype=dtype)
        assert call(out=out_TN, accumulate=True) is out_TN and (out_TN > 60).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("product", Product)
def test_weights_of_another_format(
    either: KernelSet, native: NativeKernels, product: Product, dtype: torch.dtype
) -> None:
    """Int8 weights read as bfloat16 ones, an AttributeError about a handle, or numbers without their scales."""
    weight_NK, x_TK = torch.ones(4, 64, dtype=dtype), torch.ones(3, 64, dtype=dtype)
    others = [p for p in Product if p.weight_format != product.weight_format]
    wrong = [pack(either, other, weight_NK) for other in others]
    stranger: KernelSet = native if either.name == "reference" else ReferenceKernels()
    torchs = product is Product.DENSE and (either is native or dtype == torch.float32)
    if not torchs:  # those native multiplies too
        wrong.append(pack(stranger, product, weight_NK))
    wrong.append(pack(stranger, others[0], weight_NK))
    rows, int8 = int8_rows(2, 64, dtype), either.pack_int8(weight_NK, None)
    out_TN = torch.full((5, 4), 7.0, dtype=dtype)
    for packed in wrong:
        with pytest.raises(ValueError, match=f"{product.value} was given .* weights: pack them"):
            multiply(either, product, x_TK, packed)
        with pytest.raises(ValueError, match=f"{product.value} was given .* weights: pack them"):
            either.project(product, x_TK, packed)
        if product is Product.INT8:
            with pytest.raises(ValueError, match=r"int8_matmul was given .* weights: pack them"):
                either.routed_matmul(x_TK, int8, rows, packed, out=out_TN)
    for high in (pack(stranger, Product.INT8, weight_NK), either.pack_int4(weight_NK, None)):
        with pytest.raises(ValueError, match=r"was given .* weights: pack them"):
            either.routed_matmul(x_TK, high, rows, int8, out=out_TN)
    assert (out_TN == 7).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_the_widest_int8_product(kernels: KernelSet, sign: int) -> None:
    """A sum that leaves 32 bits and comes back with the other sign."""
    width = MAX_INT8_INPUTS
    assert width == 133_144
    packed = kernels.pack_int8(torch.full((1, width), float(sign)), None)
    rows = QuantizedRows(
        torch.full((2, width), 127, dtype=torch.int8), torch.ones(2, 1), torch.float32
    )
    result_TN = kernels.int8_matmul(rows, packed)
    assert_close(result_TN, torch.full((2, 1), sign * 127.0 * width), rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match=r"133145 inputs.*at most 133144: use pack_matmul"):
        kernels.pack_int8(torch.ones(1, width + 1), None)
    with pytest.raises(ValueError, match=r"133145 inputs.*at most 133144: use pack_matmul"):
        kernels.pack_int4(torch.ones(1, width + 1), None)


def norm(shape: tuple[int, ...], width: int) -> Callable[[KernelSet, torch.dtype], Any]:
    return lambda k, t: k.rms_norm(torch.ones(shape, dtype=t), torch.ones(width, dtype=t), 1e-5)


def rows_of(name: str, shape: tuple[int, ...]) -> Callable[[KernelSet, torch.dtype], Any]:
    return lambda k, t: getattr(k, name)(torch.ones(shape, dtype=t))


def packing(
    name: str, shape: tuple[int, ...], bias: tuple[int, ...] | None = None, gated: bool = False
) -> Callable[[KernelSet, torch.dtype], Any]:
    def call(k: KernelSet, dtype: torch.dtype) -> Any:
        bias_N = None if bias is None else torch.ones(bias, dtype=dtype)
        return getattr(k, name)(torch.ones(shape, dtype=dtype), bias_N, gated=gated)

    return call


def product(
    which: Product, shape: tuple[int, ...], out: tuple[int, ...] | None = None
) -> Callable[[KernelSet, torch.dtype], Any]:
    def call(k: KernelSet, dtype: torch.dtype) -> Any:
        packed = pack(k, which, torch.ones(5, 8, dtype=dtype))
        out_TN = None if out is None else torch.ones(out, dtype=dtype)
        if not which.quantizes_rows:
            return multiply(k, which, torch.ones(shape, dtype=dtype), packed, out=out_TN)
        scale = torch.ones(shape[0], 1, dtype=dtype)
        rows = QuantizedRows(torch.ones(shape, dtype=torch.int8), scale, dtype)
        return getattr(k, which.value)(rows, packed, out=out_TN)

    return call


def scaled(
    shape: tuple[int, ...], which: Product = Product.INT8
) -> Callable[[KernelSet, torch.dtype], Any]:
    def call(k: KernelSet, dtype: torch.dtype) -> Any:
        q_TK, scale = torch.ones(3, 8, dtype=torch.int8), torch.ones(shape, dtype=dtype)
        packed = pack(k, which, torch.ones(5, 8))
        return getattr(k, which.value)(QuantizedRows(q_TK, scale, dtype), packed)

    return call


def drawn(width: int, inverse: float = 1.0, uniform: float = 0.5) -> Callable[..., Any]:
    return lambda k, t: k.draw(
        torch.ones(2, width, dtype=t),
        torch.full((2,), inverse),
        torch.full((2,), uniform, dtype=torch.float64),
    )


def cut_of(num_rows: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Cut:
    return Cut(
        torch.full((num_rows,), top_k),
        torch.full((num_rows,), top_p, dtype=torch.float64),
        torch.full((num_rows,), min_p, dtype=torch.float64),
    )


def drawn_cut(cut: Cut, width: int = 4, inverse: float = 1.0) -> Callable[..., Any]:
    return lambda k, t: k.draw_cut(
        torch.ones(2, width, dtype=t),
        torch.full((2,), inverse),
        torch.full((2,), 0.5, dtype=torch.float64),
        cut,
    )


def scored(**changes: Any) -> Callable[..., Any]:
    """A router's score of tokens or by a table that differ from those that fit."""
    tokens = {name: x for name, x in changes.items() if name in TOKENS._fields}
    table = {name: x for name, x in changes.items() if name not in tokens}
    return lambda k, t: k.router_mlp(*TOKENS._replace(**tokens), TABLE._replace(**table))


def rope(qkv: tuple[int, ...], kv: tuple[int, ...]) -> Callable[[KernelSet, torch.dtype], Any]:
    return lambda k, t: k.rope_store_kv(
        torch.ones(qkv, dtype=t),
        *torch.ones(2, qkv[0], kv[-1], dtype=t),
        torch.arange(qkv[0]),
        torch.ones(kv, dtype=t),
    )


PACK = ("pack_matmul", "pack_int8", "pack_int4")
REFUSED: dict[str, tuple[Callable[[KernelSet, torch.dtype], Any], str]] = {
    "norm of a vector": (norm((8,), 8), "x must have"),
    "norm of four dimensions": (norm((2, 2, 2, 8), 8), "x must have"),
    "norm with a short weight": (norm((3, 8), 7), "weight"),
    "norm with a wide weight": (norm((3, 8), 9), "weight"),
    "quantised vector": (rows_of("quantize_rows", (8,)), "x must be"),
    "quantised planes": (rows_of("quantize_rows", (2, 3, 8)), "x must be"),
    "quantised nothing": (rows_of("quantize_rows", (3, 0)), "x .*at least one feature"),
    "gate of a vector": (rows_of("silu_mul", (8,)), "gate_up"),
    "gate of an odd width": (rows_of("silu_mul", (3, 7)), "gate_up"),
    "largest of a vector": (rows_of("row_max", (8,)), "x must be"),
    "largest of nothing": (rows_of("row_max", (3, 0)), "x .*at least one feature"),
    "draw from nothing": (drawn(0), "x .*at least one feature"),
    "draw by one": (drawn(4, uniform=1.0), "uniform"),
    "draw by a negative number": (drawn(4, uniform=-0.1), "uniform"),
    "draw at no temperature": (drawn(4, inverse=float("inf")), "inverse_temperature"),
    "draw at a negative temperature": (drawn(4, inverse=-1.0), "inverse_temperature"),
    "cut of nothing": (drawn_cut(cut_of(2), width=0), "x .*at least one feature"),
    "cut at no temperature": (drawn_cut(cut_of(2), inverse=0.0), "inverse_temperature"),
    "cut of other rows": (drawn_cut(cut_of(3)), "top_k must have shape"),
    "cut to a negative number": (drawn_cut(cut_of(2, top_k=-1)), "top_k must be at least 0"),
    "cut to no mass": (drawn_cut(cut_of(2, top_p=0.0)), "top_p must be above 0"),
    "cut to too much mass": (drawn_cut(cut_of(2, top_p=1.1)), "top_p must be above 0 and at most"),
    "cut above the largest": (drawn_cut(cut_of(2, min_p=1.1)), "min_p must be in"),
    "cut by NaN": (drawn_cut(cut_of(2, min_p=float("nan"))), "min_p must be in"),
    "scores of other features": (scored(values_TF=torch.ones(6, 3)), "values must have shape"),
    "scores of fewer values": (scored(values_TF=TOKENS.values_TF[:5]), "must have shape"),
    "scores of other phases": (scored(phase_T=TOKENS.phase_T[:5]), "phases must have shape"),
    "scores of no phase": (scored(head_PH=TABLE.head_PH[:0]), "head must be"),
    "scores by a flat head": (scored(head_PH=TABLE.head_PH[0]), "head must be"),
    "scores by a wide table": (scored(head_PH=torch.ones(2, 3)), "table must have"),
    "an odd number of rows for ids": (scored(vocab_row=TABLE.vocab_row - 1), "vocab_row"),
    "no rows for ids": (scored(vocab_row=len(TABLE.table_KC)), "vocab_row"),
    "ids before the first row": (scored(vocab_row=-2), "vocab_row"),
    "an id before without a column": (scored(previous_column=-1), "previous_column"),
    "an id before beyond the columns": (scored(previous_column=2), "previous_column"),
    "heads of no size": (rope((3, 0), (4, 2, 0)), "kv must be"),
    "a projection of half a head": (rope((3, 28), (4, 2, 8)), "qkv"),
    "a projection without queries and keys": (rope((3, 8), (4, 2, 8)), "qkv"),
    **{f"{n} of a vector": (packing(n, (8,)), "weight") for n in PACK},
    **{f"{n} without outputs": (packing(n, (0, 8)), "weight") for n in PACK},
    **{f"{n} without inputs": (packing(n, (5, 0)), "weight") for n in PACK},
    **{f"{n}, short bias": (packing(n, (5, 8), (4,)), "bias") for n in PACK},
    **{f"{n}, one bias": (packing(n, (5, 8), (1,)), "bias") for n in PACK},
    **{f"{n}, a column": (packing(n, (5, 8), (5, 1)), "bias") for n in PACK},
    **{f"{n}, gated bias": (packing(n, (6, 8), (5,), True), "bias") for n in PACK},
    **{f"{n}, odd gate": (packing(n, (5, 8), None, True), "gated") for n in PACK},
    **{f"{p.value} of a vector": (product(p, (8,)), "rows must") for p in Product},
    **{f"{p.value} of planes": (product(p, (2, 3, 8)), "rows must") for p in Product},
    **{f"{p.value} of wide rows": (product(p, (3, 9)), "rows must") for p in Product},
    **{f"{p.value} into columns": (product(p, (3, 8), (3, 6)), "out must") for p in Product},
    **{f"{p.value} of one row": (product(p, (1, 8), (3, 5)), "out must") for p in Product},
    "fewer scales": (scaled((2, 1)), "scale must"),
    "one scale": (scaled((1, 1)), "scale must"),
    "scales in a row": (scaled((3,)), "scale must"),
    "fewer scales by 4 bits": (scaled((2, 1), Product.INT4), "scale must"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_both_refuse(either: KernelSet, name: str, dtype: torch.dtype) -> None:
    """A run that fails on one machine and gives numbers on another; a RuntimeError that names no argument."""
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call(either, dtype)


@pytest.mark.parametrize("num_rows", [0, 3])
def test_sizes_of_zero(typed: Typed, num_rows: int) -> None:
    """No rows, or rows without features, where that has a meaning: another shape, or an error of one backend."""
    kernels, dtype = typed
    x_TK = torch.ones(num_rows, 8, dtype=dtype)
    no_width = torch.ones(num_rows, 0, dtype=dtype)
    assert kernels.rms_norm(x_TK, x_TK.new_ones(8), 1e-5).shape == (num_rows, 8)
    assert kernels.rms_norm(no_width, x_TK.new_ones(0), 1e-5).shape == (num_rows, 0)
    assert kernels.silu_mul(x_TK).shape == (num_rows, 4)
    assert kernels.silu_mul(no_width).shape == (num_rows, 0)
    assert kernels.quantize_rows(x_TK).scale_T1.shape == (num_rows, 1)
    assert [len(part) for part in kernels.row_max(x_TK)] == [num_rows, num_rows]
    uniform_T = torch.full((num_rows,), 0.5, dtype=torch.float64)
    assert kernels.draw(x_TK, torch.ones(num_rows), uniform_T).shape == (num_rows,)
    cut = cut_of(num_rows, top_k=3)
    assert kernels.draw_cut(x_TK, torch.ones(num_rows), uniform_T, cut).shape == (num_rows,)
    assert kernels.router_mlp(*TOKENS.take(slice(num_rows)), TABLE).shape == (num_rows,)
    for each in Product:
        packed = pack(kernels, each, torch.ones(5, 8, dtype=dtype))
        result_TN = multiply(kernels, each, x_TK, packed)
        assert result_TN.shape == (num_rows, 5) and result_TN.dtype == dtype
        assert (result_TN.float() - 8).abs().lt(0.1).all()
