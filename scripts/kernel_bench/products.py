"""Products by packed weights. T rows, K inputs, N outputs.

Weights rotate: between two uses of a copy as many bytes of others are streamed as all layers take, as in a decode step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenrouter.kernels import KernelSet, PackedWeights, QuantizedRows, huge_pages
from tokenrouter.kernels.int8_matmul.reference import quantize_weight
from tokenrouter.kernels.silu_mul.reference import silu_mul

from .case import NATIVE, Case
from .roofline import Work
from .shapes import Linear, Shapes, Sizes

HIGH_PART = 10  # one row in so many is high in a product of two paths


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The same rows for full precision and quantised, and where native writes its result."""

    x_TK: Tensor
    rows: QuantizedRows
    out_TN: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One implementation: ``pack`` takes the linear and its weights, ``run`` what ``pack`` gave."""

    pack: Callable[[Linear, Tensor], Any]
    run: Callable[[Inputs, Any], Tensor]


def product_cases(
    backends: Sequence[KernelSet], shapes: Shapes, sizes: Sizes, *, cached: bool
) -> Iterator[Case]:
    """The four linears of a layer (gate_up is the gated product) and lm_head, in every format."""
    library = torch.backends.mkldnn.is_available()
    for operator, item_bytes, variants in (
        ("matmul", 2, {k.name: _dense(k) for k in backends}),
        ("int8_matmul", 1, {k.name: _int8(k) for k in backends} | ({"library": ONEDNN} if library else {})),
        (
            "int8_weight_matmul",
            1,
            {k.name: _int8_weight(k) for k in backends} | {"library": INT8PACK},
        ),
    ):
        for linear in (*shapes.linears, shapes.lm_head):
            copies = 1 if cached else shapes.copies(linear)
            packed = pack_copies(variants, linear, copies)
            for num_rows in sizes.rows:
                inputs = make_inputs(linear, num_rows, backends)
                ops = 2 * num_rows * linear.num_weights
                yield Case(
                    operator=operator,
                    size=size_label(linear, f"{num_rows} rows"),
                    work=product_work(
                        linear,
                        num_rows,
                        copies,
                        weight_bytes=linear.num_weights * item_bytes,
                        bf16_ops=0 if operator == "int8_matmul" else ops,
                        int8_ops=ops if operator == "int8_matmul" else 0,
                    ),
                    calls={
                        name: [partial(variants[name].run, inputs, p) for p in each]
                        for name, each in packed.items()
                    },
                )


def pack_copies(
    variants: dict[str, Variant], linear: Linear, copies: int
) -> dict[str, list[Any]]:
    """``copies`` of the same random weights in each variant's layout, on huge pages as a pool's are."""
    weight_NK = torch.randn(linear.num_outputs, linear.num_inputs).bfloat16()
    packed = {
        name: [variant.pack(linear, weight_NK) for _ in range(copies)]
        for name, variant in variants.items()
    }
    for each in packed.values():
        huge_pages.collapse(_streamed(p) for p in each)
    return packed


def make_inputs(linear: Linear, num_rows: int, backends: Sequence[KernelSet]) -> Inputs:
    """Random rows."""
    x_TK = torch.randn(num_rows, linear.num_inputs).bfloat16()
    return Inputs(
        x_TK=x_TK,
        rows=backends[0].quantize_rows(x_TK),
        out_TN=x_TK.new_empty(num_rows, linear.width),
    )


def size_label(linear: Linear, rows: str) -> str:
    """For tables: ``qkv 576 to 960, 32 rows``."""
    return f"{linear.name} {linear.num_inputs} to {linear.num_outputs}, {rows}"


def product_work(
    linear: Linear,
    num_rows: int,
    copies: int,
    *,
    weight_bytes: int,
    bf16_ops: int,
    int8_ops: int,
) -> Work:
    """Weights once, rows once (int8 rows take one byte a value), the bf16 result once."""
    item_bytes = 1 if not bf16_ops else 2
    rows_bytes = num_rows * linear.num_inputs * item_bytes
    written_bytes = num_rows * linear.width * 2
    return Work(
        read_bytes=weight_bytes + rows_bytes,
        written_bytes=written_bytes,
        bf16_ops=bf16_ops,
        int8_ops=int8_ops,
        working_set_bytes=copies * weight_bytes + rows_bytes + written_bytes,
    )


def _streamed(packed: PackedWeights | tuple[Tensor, ...]) -> Tensor:
    return packed[0] if isinstance(packed, tuple) else packed.weight


def out_for(kernels: KernelSet, inputs: Inputs) -> Tensor | None:
    """Only native writes into a given tensor: torch would make a new one and copy it."""
    return inputs.out_TN if kernels.name == NATIVE else None


def _dense(kernels: KernelSet) -> Variant:
    return Variant(
        pack=lambda linear, w_NK: kernels.pack_matmul(w_NK, None, gated=linear.gated),
        run=lambda i, packed: kernels.matmul(i.x_TK, packed, out=out_for(kernels, i)),
    )


def _int8(kernels: KernelSet) -> Variant:
    return Variant(
        pack=lambda linear, w_NK: kernels.pack_int8(w_NK, None, gated=linear.gated),
        run=lambda i, packed: kernels.int8_matmul(i.rows, packed, out=out_for(kernels, i)),
    )


def _int8_weight(kernels: KernelSet) -> Variant:
    return Variant(
        pack=lambda linear, w_NK: kernels.pack_int8(w_NK, None, gated=linear.gated),
        run=lambda i, packed: kernels.int8_weight_matmul(i.x_TK, packed, out=out_for(kernels, i)),
    )


def _pack_onednn(linear: Linear, weight_NK: Tensor) -> tuple[Tensor, ...]:
    q_NK, scale_N = quantize_weight(weight_NK)
    zero_point_N = torch.zeros(linear.num_outputs, dtype=torch.int32)
    return torch.ops.onednn.qlinear_prepack(q_NK, None), scale_N, zero_point_N, torch.tensor(linear.gated)


def _run_onednn(inputs: Inputs, packed: tuple[Tensor, ...]) -> Tensor:
    """oneDNN has one scale for all rows, so the rows' own are multiplied in afterwards."""
    blocked, scale_N, zero_point_N, gated = packed
    y_TN: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        inputs.rows.q_TK, 1.0, 0, blocked, scale_N, zero_point_N, None, 1.0, 0,
        torch.bfloat16, "none", [], "",
    )
    y_TN.mul_(inputs.rows.scale_T1)
    return silu_mul(y_TN) if gated else y_TN


def _pack_int8pack(linear: Linear, weight_NK: Tensor) -> tuple[Tensor, ...]:
    q_NK, scale_N = quantize_weight(weight_NK)
    return q_NK, scale_N.bfloat16(), torch.tensor(linear.gated)


def _run_int8pack(inputs: Inputs, packed: tuple[Tensor, ...]) -> Tensor:
    q_NK, scale_N, gated = packed
    y_TN = torch._weight_int8pack_mm(inputs.x_TK, q_NK, scale_N)
    return silu_mul(y_TN) if gated else y_TN


ONEDNN = Variant(pack=_pack_onednn, run=_run_onednn)
INT8PACK = Variant(pack=_pack_int8pack, run=_run_int8pack)
