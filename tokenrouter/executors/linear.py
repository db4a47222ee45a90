"""What the plain paths share: all linears of a path are one kind of product, over one format of weights.

T tokens of a slice, E hidden size, O fused q, k, v outputs, A attention outputs, V vocabulary.
"""

from typing import ClassVar

from torch import Tensor

from tokenrouter.executors.base import Executor
from tokenrouter.executors.packing import PackedLinears, PackedModel
from tokenrouter.kernels import LayerTail, Norm, Product, TailWeights


class LinearExecutor(Executor):
    """Every linear as ``product``; q, k, v share one norm (and quantisation) of their input, so do gate and up."""

    product: ClassVar[Product]

    def __init__(self, packed: PackedModel) -> None:
        super().__init__(packed)
        self._linears = self._choose_linears(packed)
        self._input_norms = [Norm(norm_E, self._eps) for norm_E in self._linears.input_norms]
        self._final_norm = Norm(self._final_norm_E, self._eps)
        self._tails = [self._tail(layer) for layer in range(len(self._layers))]

    def qkv(self, layer: int, hidden_TE: Tensor, out_TO: Tensor) -> None:
        """See Executor."""
        weights, norm = self._linears.qkv[layer], self._input_norms[layer]
        self._kernels.project(self.product, hidden_TE, weights, norm=norm, out=out_TO)
        self._norm_heads(layer, out_TO)

    def finish_layer(
        self, layer: int, heads_TA: Tensor, hidden_TE: Tensor, next_qkv_TO: Tensor | None = None
    ) -> None:
        """See Executor."""
        self._tails[layer](heads_TA, hidden_TE, next_qkv_TO)
        if next_qkv_TO is not None:
            self._norm_heads(layer + 1, next_qkv_TO)

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """See Executor."""
        lm_head, norm = self._linears.lm_head, self._final_norm
        return self._kernels.project(self.product, hidden_TE, lm_head, norm=norm)

    @property
    def version(self) -> str:
        """See Executor: with a hash of the scales that are folded in, where there are any."""
        return "-".join(filter(None, (self.name, self._linears.version)))

    @property
    def packed_weights(self) -> list[Tensor]:
        """See Executor."""
        return self._linears.weights

    def _choose_linears(self, packed: PackedModel) -> PackedLinears:
        """The weights, and the norms in front of them; for subclasses to fold scales into both."""
        return packed.linears(self.product)

    def _tail(self, layer: int) -> LayerTail:
        linears, following = self._linears, layer + 1
        is_last = following == len(self._layers)
        weights = TailWeights(
            out=linears.out[layer],
            norm=Norm(linears.post_norms[layer], self._eps),
            gate_up=linears.gate_up[layer],
            down=linears.down[layer],
            next_norm=None if is_last else self._input_norms[following],
            next_qkv=None if is_last else linears.qkv[following],
        )
        return self._kernels.layer_tail(self.product, weights)
