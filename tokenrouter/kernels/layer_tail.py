"""What follows attention in a layer, as one operator: the base class's way, out of other operators.

T rows, E hidden size, A attention outputs, I intermediate, O fused q, k, v outputs.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from tokenrouter.kernels.values import Norm, PackedWeights, Product

if TYPE_CHECKING:
    from tokenrouter.kernels.base import KernelSet


@dataclass(frozen=True, kw_only=True, slots=True)
class TailWeights:
    """What a layer multiplies by after attention, and what the next one multiplies by before its own.

    Attributes:
        out: attention's output projection.
        norm: of the MLP's input.
        gate_up: gated.
        down: back to the hidden size.
        next_norm, next_qkv: of the next layer; None in the last.
    """

    out: PackedWeights
    norm: Norm
    gate_up: PackedWeights
    down: PackedWeights
    next_norm: Norm | None = None
    next_qkv: PackedWeights | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ComposedTail:
    """A LayerTail as its parts, one after the other."""

    kernels: "KernelSet"
    product: Product
    weights: TailWeights

    def __call__(self, heads_TA: Tensor, hidden_TE: Tensor, qkv_TO: Tensor | None) -> None:
        """See LayerTail."""
        kernels, product, w = self.kernels, self.product, self.weights
        if qkv_TO is not None and w.next_qkv is None:
            raise ValueError("there is no next layer to project for")
        kernels.project(product, heads_TA, w.out, out=hidden_TE, accumulate=True)
        gated_TI = kernels.project(product, hidden_TE, w.gate_up, norm=w.norm)
        kernels.project(product, gated_TI, w.down, out=hidden_TE, accumulate=True)
        if qkv_TO is not None and w.next_qkv is not None:
            kernels.project(product, hidden_TE, w.next_qkv, norm=w.next_norm, out=qkv_TO)
