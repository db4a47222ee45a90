"""A model's linears packed for a backend, once per format: executors of a pool that use the same format share it.

The norms in front of linears stand beside them, since scales that are folded into one have to be in the other.

E hidden size, O fused q, k, v outputs, A attention outputs (H D), J fused gate and up, I intermediate.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from tokenrouter.kernels import KernelSet, PackedWeights, Product, WeightFormat
from tokenrouter.models import LoadedModel
from tokenrouter.models.weights import LayerWeights


class Folded(NamedTuple):
    """A model's layers with scales folded into norms and linears, and a hash of what the scales come from."""

    layers: Iterable[LayerWeights]
    version: str


class Folding(Protocol):
    """A way to choose such scales. Equal ones, which have equal hashes, are folded and packed once."""

    def __hash__(self) -> int: ...

    def fold(self, model: LoadedModel) -> Folded:
        """Layers of ``model``, which stays as it is: norms in its dtype, linears in any float dtype."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLinears:
    """The linears of all layers and lm_head in one format, and the layers' norms.

    Attributes:
        input_norms: weight of the norm before q, k, v, ``[E]`` per layer, in the model's dtype.
        post_norms: of the norm before gate and up.
        qkv, out, gate_up, down: per layer.
        lm_head: after the model's own final norm.
        version: of the scales that are folded in; empty without any.
    """

    input_norms: list[Tensor]
    post_norms: list[Tensor]
    qkv: list[PackedWeights]
    out: list[PackedWeights]
    gate_up: list[PackedWeights]
    down: list[PackedWeights]
    lm_head: PackedWeights
    version: str = ""

    @classmethod
    def of(
        cls, model: LoadedModel, pack: Callable[..., PackedWeights], folded: Folded | None = None
    ) -> "PackedLinears":
        """Packs every linear of ``model`` with ``pack(weight, bias)``, gate and up as ``gated``; a layer at a time.

        ``folded``: layers to take instead of the model's own.
        """
        layers, version = folded or Folded(model.weights.layers, "")
        packed = cls(
            input_norms=[],
            post_norms=[],
            qkv=[],
            out=[],
            gate_up=[],
            down=[],
            lm_head=pack(model.weights.lm_head_VE, None),
            version=version,
        )
        for layer in layers:
            packed.input_norms.append(layer.input_norm_E)
            packed.post_norms.append(layer.post_norm_E)
            packed.qkv.append(pack(layer.qkv_OE, layer.qkv_bias_O))
            packed.out.append(pack(layer.out_EA, layer.out_bias_E))
            packed.gate_up.append(pack(layer.gate_up_JE, layer.gate_up_bias_J, gated=True))
            packed.down.append(pack(layer.down_EI, layer.down_bias_E))
        return packed

    @property
    def weights(self) -> list[Tensor]:
        """All packed weight tensors."""
        packed = [*self.qkv, *self.out, *self.gate_up, *self.down, self.lm_head]
        return [p.weight for p in packed]


def packer(kernels: KernelSet, product: Product) -> Callable[..., PackedWeights]:
    """What packs weights in the format that ``product`` multiplies by."""
    match product.weight_format:
        case "dense":
            return kernels.pack_matmul
        case "int8":
            return kernels.pack_int8
        case "int4":
            return kernels.pack_int4


class PackedModel:
    """What executors are made of: a model, a backend, and the model's linears in the formats asked for."""

    def __init__(self, model: LoadedModel, kernels: KernelSet) -> None:
        self.model = model
        self.kernels = kernels
        self._linears: dict[WeightFormat, PackedLinears] = {}
        self._int8_folded: dict[Folding, PackedLinears] = {}

    def linears(self, product: Product) -> PackedLinears:
        """In the format that ``product`` multiplies by."""
        form = product.weight_format
        if form not in self._linears:
            self._linears[form] = PackedLinears.of(self.model, packer(self.kernels, product))
        return self._linears[form]

    def int8_folded(self, folding: Folding) -> PackedLinears:
        """Int8 with a scale per output channel, of the layers that ``folding`` gives."""
        if folding not in self._int8_folded:
            folded = folding.fold(self.model)
            self._int8_folded[folding] = PackedLinears.of(
                self.model, self.kernels.pack_int8, folded
            )
        return self._int8_folded[folding]
