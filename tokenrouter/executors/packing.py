"""A model's linears packed for a backend, once per format: executors of a pool that use the same format share it.

E hidden size, O fused q, k, v outputs, A attention outputs (H D), J fused gate and up, I intermediate.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from tokenrouter.kernels import KernelSet, PackedWeights, Product
from tokenrouter.models import LoadedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLinears:
    """The linears of all layers and lm_head in one format."""

    qkv: list[PackedWeights]
    out: list[PackedWeights]
    gate_up: list[PackedWeights]
    down: list[PackedWeights]
    lm_head: PackedWeights

    @classmethod
    def of(cls, model: LoadedModel, pack: Callable[..., PackedWeights]) -> "PackedLinears":
        """Packs every linear of ``model`` with ``pack(weight, bias)``, gate and up as ``gated``."""
        layers = model.weights.layers
        return cls(
            qkv=[pack(layer.qkv_OE, layer.qkv_bias_O) for layer in layers],
            out=[pack(layer.out_EA, layer.out_bias_E) for layer in layers],
            gate_up=[pack(layer.gate_up_JE, layer.gate_up_bias_J, gated=True) for layer in layers],
            down=[pack(layer.down_EI, layer.down_bias_E) for layer in layers],
            lm_head=pack(model.weights.lm_head_VE, None),
        )

    @property
    def weights(self) -> list[Tensor]:
        """All packed weight tensors."""
        packed = [*self.qkv, *self.out, *self.gate_up, *self.down, self.lm_head]
        return [p.weight for p in packed]


class PackedModel:
    """What executors are made of: a model, a backend, and the model's linears in the formats asked for."""

    def __init__(self, model: LoadedModel, kernels: KernelSet) -> None:
        self.model = model
        self.kernels = kernels

    def linears(self, product: Product) -> PackedLinears:
        """In the format that ``product`` multiplies by."""
        return self._dense if product is Product.DENSE else self._int8

    @cached_property
    def _dense(self) -> PackedLinears:
        """In the model's dtype."""
        return PackedLinears.of(self.model, self.kernels.pack_matmul)

    @cached_property
    def _int8(self) -> PackedLinears:
        """Int8 with a scale per output channel."""
        return PackedLinears.of(self.model, self.kernels.pack_int8)
