"""Products of rows of two paths, a tenth of them high, against the two products after each other.

T rows (high ones first), K inputs, N outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from tokenrouter.kernels import KernelSet, PackedWeights, QuantizedRows

from .case import NATIVE, SEPARATE, Case
from .products import Inputs, Variant, make_inputs, pack_copies, size_label, variants_of
from .roofline import Work
from .shapes import Linear, Shapes, Sizes

HIGH_PART = 10  # one row in so many is high, at least one


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixed:
    """Rows of both paths, and the result."""

    high_TK: Tensor
    low: QuantizedRows
    out_TN: Tensor

    @property
    def num_high(self) -> int:
        return self.high_TK.shape[0]


def routed_cases(
    backends: Sequence[KernelSet], shapes: Shapes, sizes: Sizes, *, cached: bool
) -> Iterator[Case]:
    """``dense``: high rows by bf16 weights, low rows by int8 ones; ``shared``: both by the same int8 weights."""
    for linear in shapes.linears:
        copies = 1 if cached else shapes.copies(linear)
        int8 = pack_copies(_only(backends, "int8_matmul"), linear, copies)
        dense = pack_copies(_only(backends, "matmul"), linear, copies)
        for kind, high in (("dense", dense), ("shared", int8)):
            for num_rows in sizes.routed_rows:
                mixed = _mix(make_inputs(linear, num_rows, backends[0]))
                calls = {}
                for kernels in backends:
                    pairs = list(zip(high[kernels.name], int8[kernels.name], strict=True))
                    calls[kernels.name] = [partial(_routed, kernels, mixed, *p) for p in pairs]
                    if kernels.name == NATIVE:
                        product = kernels.matmul if kind == "dense" else kernels.int8_weight_matmul
                        calls[SEPARATE] = [
                            partial(_separate, kernels, product, mixed, *p) for p in pairs
                        ]
                yield Case(
                    operator="routed_matmul",
                    size=size_label(linear, f"{mixed.num_high} of {num_rows} rows high, {kind}"),
                    work=_work(linear, mixed, copies, shared=kind == "shared"),
                    calls=calls,
                )


def _only(backends: Sequence[KernelSet], operator: str) -> dict[str, Variant]:
    return {k.name: variants_of(operator, backends)[k.name] for k in backends}


def _mix(inputs: Inputs) -> Mixed:
    num_high = max(1, inputs.x_TK.shape[0] // HIGH_PART)
    rows = inputs.rows
    return Mixed(
        high_TK=inputs.x_TK[:num_high],
        low=QuantizedRows(rows.q_TK[num_high:], rows.scale_T1[num_high:], rows.dtype),
        out_TN=inputs.out_TN,
    )


def _routed(kernels: KernelSet, mixed: Mixed, high: PackedWeights, low: PackedWeights) -> Tensor:
    return kernels.routed_matmul(mixed.high_TK, high, mixed.low, low, out=mixed.out_TN)


def _separate(
    kernels: KernelSet,
    product: Callable[..., Tensor],
    mixed: Mixed,
    high: PackedWeights,
    low: PackedWeights,
) -> Tensor:
    product(mixed.high_TK, high, out=mixed.out_TN[: mixed.num_high])
    kernels.int8_matmul(mixed.low, low, out=mixed.out_TN[mixed.num_high :])
    return mixed.out_TN


def _work(linear: Linear, mixed: Mixed, copies: int, *, shared: bool) -> Work:
    num_rows, num_high = mixed.out_TN.shape[0], mixed.num_high
    weight_bytes = linear.num_weights * (1 if shared else 3)
    rows_bytes = (num_rows + num_high) * linear.num_inputs
    written_bytes = num_rows * linear.width * 2
    return Work(
        read_bytes=weight_bytes + rows_bytes,
        written_bytes=written_bytes,
        bf16_ops=2 * num_high * linear.num_weights,
        int8_ops=2 * (num_rows - num_high) * linear.num_weights,
        working_set_bytes=copies * weight_bytes + rows_bytes + written_bytes,
    )
