"""What the plain paths share: all linears of a path are one kind of product, over one format of weights.

T tokens of a slice, E hidden size, O fused q, k, v outputs, A attention outputs, V vocabulary.
"""

from typing import ClassVar

from torch import Tensor

from tokenrouter.executors.base import Executor
from tokenrouter.executors.packing import PackedModel
from tokenrouter.kernels import Norm, Product


class LinearExecutor(Executor):
    """Every linear as ``product``; q, k, v share one norm (and quantisation) of their input, so do gate and up."""

    product: ClassVar[Product]

    def __init__(self, packed: PackedModel) -> None:
        super().__init__(packed)
        self._linears = packed.linears(self.product)
        self._input_norms = [Norm(layer.input_norm_E, self._eps) for layer in self._layers]
        self._post_norms = [Norm(layer.post_norm_E, self._eps) for layer in self._layers]

    def qkv(self, layer: int, hidden_TE: Tensor, out_TO: Tensor) -> None:
        """See Executor."""
        weights, norm = self._linears.qkv[layer], self._input_norms[layer]
        self._kernels.project(self.product, hidden_TE, weights, norm=norm, out=out_TO)
        self._norm_heads(layer, out_TO)

    def attention_out(self, layer: int, heads_TA: Tensor, hidden_TE: Tensor) -> None:
        """See Executor."""
        weights = self._linears.out[layer]
        self._kernels.project(self.product, heads_TA, weights, out=hidden_TE, accumulate=True)

    def mlp(self, layer: int, hidden_TE: Tensor) -> None:
        """See Executor."""
        gate_up, down = self._linears.gate_up[layer], self._linears.down[layer]
        self._kernels.mlp(self.product, hidden_TE, self._post_norms[layer], gate_up, down)

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """See Executor."""
        norm = Norm(self._final_norm_E, self._eps)
        return self._kernels.project(self.product, hidden_TE, self._linears.lm_head, norm=norm)

    @property
    def packed_weights(self) -> list[Tensor]:
        """See Executor."""
        return self._linears.weights
