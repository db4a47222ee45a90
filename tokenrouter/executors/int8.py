"""The plain low path: W8A8, one scale per output channel and one per token.

These are LLM.int8's vector-wise scales (Dettmers et al. 2022, arXiv:2208.07339) without the outlier split.
"""

from torch import Tensor

from tokenrouter.executors.base import Executor, PackedLinears
from tokenrouter.kernels import KernelSet
from tokenrouter.models import LoadedModel


class Int8Executor(Executor):
    """Int8 products of all body linears and lm_head. q, k, v share one quantisation of their input, so do gate, up."""

    name = "int8"

    def __init__(self, model: LoadedModel, kernels: KernelSet) -> None:
        super().__init__(model, kernels)
        self._linears = PackedLinears.of(model, kernels.pack_int8)

    def qkv(self, layer: int, hidden_TE: Tensor) -> Tensor:
        """See Executor."""
        weights, kernels = self._layers[layer], self._kernels
        rows = kernels.quantize_rows(kernels.rms_norm(hidden_TE, weights.input_norm_E, self._eps))
        return self._norm_heads(
            kernels.int8_matmul(rows, self._linears.qkv[layer]), weights.q_norm_D, weights.k_norm_D
        )

    def attention_out(self, layer: int, heads_TA: Tensor, hidden_TE: Tensor) -> None:
        """See Executor."""
        kernels = self._kernels
        hidden_TE.add_(
            kernels.int8_matmul(kernels.quantize_rows(heads_TA), self._linears.out[layer])
        )

    def mlp(self, layer: int, hidden_TE: Tensor) -> None:
        """See Executor."""
        kernels = self._kernels
        rows = kernels.quantize_rows(
            kernels.rms_norm(hidden_TE, self._layers[layer].post_norm_E, self._eps)
        )
        gated_TI = kernels.silu_mul(kernels.int8_matmul(rows, self._linears.gate_up[layer]))
        hidden_TE.add_(
            kernels.int8_matmul(kernels.quantize_rows(gated_TI), self._linears.down[layer])
        )

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """See Executor."""
        kernels = self._kernels
        rows = kernels.quantize_rows(kernels.rms_norm(hidden_TE, self._final_norm_E, self._eps))
        return kernels.int8_matmul(rows, self._linears.lm_head)

    @property
    def packed_weights(self) -> list[Tensor]:
        """See Executor."""
        return self._linears.weights
