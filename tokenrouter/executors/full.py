"""The high paths: full-precision activations, with weights in the model's own dtype or in int8.

T tokens of a slice, E hidden size, O fused q, k, v outputs, A attention outputs, V vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor

from tokenrouter.executors.base import Executor
from tokenrouter.executors.packing import PackedLinears, PackedModel, RowBuffers


class FullActivationExecutor(Executor):
    """What paths with full-precision activations share; they differ in weights and product."""

    def __init__(self, packed: PackedModel) -> None:
        super().__init__(packed)
        self._linears, self._product = self._choose(packed)
        config, dtype = packed.model.config, packed.model.dtype
        self._buffers = RowBuffers(
            {
                "normed": (config.hidden_size, dtype),
                "gated": (config.intermediate_size, dtype),
            }
        )

    @abstractmethod
    def _choose(self, packed: PackedModel) -> tuple[PackedLinears, Callable[..., Tensor]]:
        """The weights, and the kernel that multiplies by them."""

    def qkv(self, layer: int, hidden_TE: Tensor, out_TO: Tensor) -> None:
        """See Executor."""
        normed_TE = self._buffers.rows(hidden_TE.shape[0])["normed"]
        norm_E = self._layers[layer].input_norm_E
        self._kernels.rms_norm(hidden_TE, norm_E, self._eps, out=normed_TE)
        self._product(normed_TE, self._linears.qkv[layer], out=out_TO)
        self._norm_heads(layer, out_TO)

    def attention_out(self, layer: int, heads_TA: Tensor, hidden_TE: Tensor) -> None:
        """See Executor."""
        self._product(heads_TA, self._linears.out[layer], out=hidden_TE, accumulate=True)

    def mlp(self, layer: int, hidden_TE: Tensor) -> None:
        """See Executor."""
        buffers, norm_E = self._buffers.rows(hidden_TE.shape[0]), self._layers[layer].post_norm_E
        self._kernels.rms_norm(hidden_TE, norm_E, self._eps, out=buffers["normed"])
        self._product(buffers["normed"], self._linears.gate_up[layer], out=buffers["gated"])
        self._product(buffers["gated"], self._linears.down[layer], out=hidden_TE, accumulate=True)

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """See Executor."""
        normed_TE = self._kernels.rms_norm(hidden_TE, self._final_norm_E, self._eps)
        return self._product(normed_TE, self._linears.lm_head)

    @property
    def packed_weights(self) -> list[Tensor]:
        """See Executor."""
        return self._linears.weights


class FullExecutor(FullActivationExecutor):
    """Dense products in the dtype that the model was loaded in."""

    name = "full"

    def _choose(self, packed: PackedModel) -> tuple[PackedLinears, Callable[..., Tensor]]:
        return packed.dense, packed.kernels.matmul
