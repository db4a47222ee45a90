"""The high path: the model's own dtype, weights packed once."""

from torch import Tensor

from tokenrouter.executors.base import Executor, PackedLinears
from tokenrouter.kernels import KernelSet
from tokenrouter.models import LoadedModel


class FullExecutor(Executor):
    """Dense products in the dtype that the model was loaded in."""

    name = "full"

    def __init__(self, model: LoadedModel, kernels: KernelSet) -> None:
        super().__init__(model, kernels)
        self._linears = PackedLinears.of(model, kernels.pack_matmul)

    def qkv(self, layer: int, hidden_TE: Tensor) -> Tensor:
        """See Executor."""
        weights, kernels = self._layers[layer], self._kernels
        normed_TE = kernels.rms_norm(hidden_TE, weights.input_norm_E, self._eps)
        return self._norm_heads(
            kernels.matmul(normed_TE, self._linears.qkv[layer]), weights.q_norm_D, weights.k_norm_D
        )

    def attention_out(self, layer: int, heads_TA: Tensor, hidden_TE: Tensor) -> None:
        """See Executor."""
        hidden_TE.add_(self._kernels.matmul(heads_TA, self._linears.out[layer]))

    def mlp(self, layer: int, hidden_TE: Tensor) -> None:
        """See Executor."""
        kernels = self._kernels
        normed_TE = kernels.rms_norm(hidden_TE, self._layers[layer].post_norm_E, self._eps)
        gated_TI = kernels.silu_mul(kernels.matmul(normed_TE, self._linears.gate_up[layer]))
        hidden_TE.add_(kernels.matmul(gated_TI, self._linears.down[layer]))

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """See Executor."""
        return self._kernels.matmul(
            self._kernels.rms_norm(hidden_TE, self._final_norm_E, self._eps), self._linears.lm_head
        )

    @property
    def packed_weights(self) -> list[Tensor]:
        """See Executor."""
        return self._linears.weights
