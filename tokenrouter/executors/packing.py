"""A model's linears packed for a backend, once per format: executors of a pool that use the same format share it.

T tokens, E hidden size, O fused q, k, v outputs, A attention outputs (H D), J fused gate and up, I intermediate.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tokenrouter.kernels import KernelSet, PackedWeights
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

    @cached_property
    def dense(self) -> PackedLinears:
        """In the model's dtype."""
        return PackedLinears.of(self.model, self.kernels.pack_matmul)

    @cached_property
    def int8(self) -> PackedLinears:
        """Int8 with a scale per output channel."""
        return PackedLinears.of(self.model, self.kernels.pack_int8)


class RowBuffers:
    """Named work space for a varying number of rows: made once for the most rows seen, and handed out as views.

    So a pool runs one forward at a time.
    """

    def __init__(self, widths: dict[str, tuple[int, torch.dtype]]) -> None:
        """``widths``: per name the features of a row and their dtype."""
        self._widths = widths
        self._capacity = 0
        self._whole: dict[str, Tensor] = {}
        self._views: dict[int, dict[str, Tensor]] = {}

    def rows(self, num_rows: int) -> dict[str, Tensor]:
        """``[num_rows, width]`` per name; contents are whatever the last user left."""
        found = self._views.get(num_rows)
        if found is not None:
            return found
        if num_rows > self._capacity:
            self._capacity = num_rows
            self._views.clear()
            with torch.inference_mode(False):  # usable in and out of it
                self._whole = {
                    name: torch.empty(num_rows, width, dtype=dtype)
                    for name, (width, dtype) in self._widths.items()
                }
        views = {name: whole[:num_rows] for name, whole in self._whole.items()}
        self._views[num_rows] = views
        return views
