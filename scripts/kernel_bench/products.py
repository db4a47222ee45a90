"""Products by packed weights. T rows, K inputs, N outputs.

Weights rotate: between two uses of a copy as many bytes of others are streamed as all layers take, as in a decode step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenrouter.kernels import KernelSet, PackedWeights, Product, QuantizedRows, huge_pages
from tokenrouter.kernels.int8_matmul.reference import PackedInt8, quantize_weight
from tokenrouter.kernels.silu_mul.reference import silu_mul

from .case import LIBRARY, NATIVE, Case
from .roofline import Work
from .shapes import Linear, Shapes, Sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The same rows for full precision and quantised, and where native writes its result."""

    x_TK: Tensor
    rows: QuantizedRows
    out_TN: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One implementation: ``pack`` takes weights and whether they are gated, ``run`` what ``pack`` gave."""

    pack: Callable[[Tensor, bool], PackedWeights]
    run: Callable[[Inputs, Any], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class OnednnPacked:
    """Int8 weights in oneDNN's layout."""

    weight: Tensor
    scale_N: Tensor
    zero_point_N: Tensor
    gated: bool


def product_cases(
    backends: Sequence[KernelSet], shapes: Shapes, sizes: Sizes, *, cached: bool
) -> Iterator[Case]:
    """The four linears of a layer (gate_up is the gated product) and lm_head, in every format."""
    for product in Product:
        operator = product.value
        for linear in (*shapes.linears, shapes.lm_head):
            copies = 1 if cached else shapes.copies(linear)
            variants = variants_of(operator, backends)
            packed = pack_copies(variants, linear, copies)
            for num_rows in sizes.rows:
                inputs = make_inputs(linear, num_rows, backends[0])
                yield Case(
                    operator=operator,
                    size=size_label(linear, f"{num_rows} rows"),
                    work=_work(product, linear, num_rows, copies),
                    calls={
                        name: [partial(variants[name].run, inputs, p) for p in each]
                        for name, each in packed.items()
                    },
                )


def variants_of(operator: str, backends: Sequence[KernelSet]) -> dict[str, Variant]:
    """The backends by name, and torch's own int8 operator as ``library`` (its dense one is the reference)."""
    if operator == "matmul":
        return {k.name: _dense(k) for k in backends}
    if operator == "int8_weight_matmul":
        return {k.name: _int8_weight(k) for k in backends} | {LIBRARY: _INT8PACK}
    if operator == "int4_matmul":
        return {k.name: _int4(k) for k in backends}
    found = {k.name: _int8(k) for k in backends}
    return found | ({LIBRARY: _ONEDNN} if torch.backends.mkldnn.is_available() else {})


def pack_copies(
    variants: dict[str, Variant], linear: Linear, copies: int
) -> dict[str, list[PackedWeights]]:
    """``copies`` of the same random weights in each variant's layout, on huge pages as a pool's are."""
    weight_NK = torch.randn(linear.num_outputs, linear.num_inputs).bfloat16()
    packed = {
        name: [variant.pack(weight_NK, linear.gated) for _ in range(copies)]
        for name, variant in variants.items()
    }
    for each in packed.values():
        huge_pages.collapse(p.weight for p in each)
    return packed


def make_inputs(linear: Linear, num_rows: int, quantizer: KernelSet) -> Inputs:
    """Random rows."""
    x_TK = torch.randn(num_rows, linear.num_inputs).bfloat16()
    return Inputs(
        x_TK=x_TK,
        rows=quantizer.quantize_rows(x_TK),
        out_TN=x_TK.new_empty(num_rows, linear.width),
    )


def size_label(linear: Linear, rows: str) -> str:
    """For tables: ``qkv 576 to 960, 32 rows``."""
    return f"{linear.name} {linear.num_inputs} to {linear.num_outputs}, {rows}"


def weight_bytes_of(product: Product, num_weights: int) -> int:
    """What ``num_weights`` take, with steps and offsets of groups; scales of output channels are too few to count."""
    match product.weight_format:
        case "dense":
            return 2 * num_weights
        case "int8":
            return num_weights
        case "int4":
            return num_weights * 9 // 16


def _work(product: Product, linear: Linear, num_rows: int, copies: int) -> Work:
    """Weights once, rows once, the bf16 result once.

    Full-precision rows by int8 weights count at the bf16 rate, 4-bit weights at the int8 rate: they are multiplied so.
    """
    int8 = product.quantizes_rows
    weight_bytes = weight_bytes_of(product, linear.num_weights)
    rows_bytes = num_rows * linear.num_inputs * (1 if int8 else 2)
    written_bytes, ops = num_rows * linear.width * 2, 2 * num_rows * linear.num_weights
    return Work(
        read_bytes=weight_bytes + rows_bytes,
        written_bytes=written_bytes,
        bf16_ops=0 if int8 else ops,
        int8_ops=ops if int8 else 0,
        working_set_bytes=copies * weight_bytes + rows_bytes + written_bytes,
    )


def _out(kernels: KernelSet, inputs: Inputs) -> Tensor | None:
    """Only native is given ``out``: torch would make a tensor all the same and copy it."""
    return inputs.out_TN if kernels.name == NATIVE else None


def _dense(kernels: KernelSet) -> Variant:
    return Variant(
        pack=lambda weight_NK, gated: kernels.pack_matmul(weight_NK, None, gated=gated),
        run=lambda i, packed: kernels.matmul(i.x_TK, packed, out=_out(kernels, i)),
    )


def _int8(kernels: KernelSet) -> Variant:
    return Variant(
        pack=lambda weight_NK, gated: kernels.pack_int8(weight_NK, None, gated=gated),
        run=lambda i, packed: kernels.int8_matmul(i.rows, packed, out=_out(kernels, i)),
    )


def _int4(kernels: KernelSet) -> Variant:
    return Variant(
        pack=lambda weight_NK, gated: kernels.pack_int4(weight_NK, None, gated=gated),
        run=lambda i, packed: kernels.int4_matmul(i.rows, packed, out=_out(kernels, i)),
    )


def _int8_weight(kernels: KernelSet) -> Variant:
    return Variant(
        pack=lambda weight_NK, gated: kernels.pack_int8(weight_NK, None, gated=gated),
        run=lambda i, packed: kernels.int8_weight_matmul(i.x_TK, packed, out=_out(kernels, i)),
    )


def _pack_onednn(weight_NK: Tensor, gated: bool) -> OnednnPacked:
    q_NK, scale_N = quantize_weight(weight_NK)
    return OnednnPacked(
        weight=torch.ops.onednn.qlinear_prepack(q_NK, None),
        scale_N=scale_N,
        zero_point_N=torch.zeros(scale_N.shape, dtype=torch.int32),
        gated=gated,
    )


def _run_onednn(inputs: Inputs, packed: OnednnPacked) -> Tensor:
    """oneDNN takes one scale for all rows, so the rows' own are multiplied in afterwards."""
    y_TN: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        inputs.rows.q_TK,
        1.0,
        0,
        packed.weight,
        packed.scale_N,
        packed.zero_point_N,
        None,
        1.0,
        0,
        torch.bfloat16,
        "none",
        [],
        "",
    )
    y_TN.mul_(inputs.rows.scale_T1)
    return silu_mul(y_TN) if packed.gated else y_TN


def _pack_int8pack(weight_NK: Tensor, gated: bool) -> PackedInt8:
    q_NK, scale_N = quantize_weight(weight_NK)
    return PackedInt8(weight=q_NK, scale_N=scale_N.bfloat16(), bias_N=None, gated=gated)


def _run_int8pack(inputs: Inputs, packed: PackedInt8) -> Tensor:
    y_TN = torch._weight_int8pack_mm(inputs.x_TK, packed.weight, packed.scale_N)
    return silu_mul(y_TN) if packed.gated else y_TN


_ONEDNN = Variant(pack=_pack_onednn, run=_run_onednn)
_INT8PACK = Variant(pack=_pack_int8pack, run=_run_int8pack)
