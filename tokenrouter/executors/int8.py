"""The plain low path: W8A8, one scale per output channel and one per token.

These are LLM.int8's vector-wise scales (Dettmers et al. 2022, arXiv:2208.07339) without the outlier split.
"""

from torch import Tensor

from tokenrouter.executors.base import Executor
from tokenrouter.kernels import KernelSet
from tokenrouter.models import LoadedModel


class Int8Executor(Executor):
    """Int8 products of all body linears and lm_head. q, k, v share one quantisation of their input, so do gate, up."""

    name = "int8"

    def __init__(self, model: LoadedModel, kernels: KernelSet) -> None:
        super().__init__(model, kernels)
        pack, weights = kernels.pack_int8, model.weights
        self._layers = weights.layers
        self._qkv = [pack(layer.qkv_OE, layer.qkv_bias_O) for layer in weights.layers]
        self._out = [pack(layer.out_EA, layer.out_bias_E) for layer in weights.layers]
        self._gate_up = [pack(layer.gate_up_JE, layer.gate_up_bias_J) for layer in weights.layers]
        self._down = [pack(layer.down_EI, layer.down_bias_E) for layer in weights.layers]
        self._final_norm_E = weights.final_norm_E
        self._lm_head = pack(weights.lm_head_VE, None)

    def qkv(self, layer: int, hidden_TE: Tensor) -> Tensor:
        """See Executor."""
        weights, kernels = self._layers[layer], self._kernels
        rows = kernels.quantize_rows(kernels.rms_norm(hidden_TE, weights.input_norm_E, self._eps))
        return self._norm_heads(
            kernels.int8_matmul(rows, self._qkv[layer]), weights.q_norm_D, weights.k_norm_D
        )

    def attention_out(self, layer: int, heads_TA: Tensor, hidden_TE: Tensor) -> None:
        """See Executor."""
        kernels = self._kernels
        hidden_TE.add_(kernels.int8_matmul(kernels.quantize_rows(heads_TA), self._out[layer]))

    def mlp(self, layer: int, hidden_TE: Tensor) -> None:
        """See Executor."""
        kernels = self._kernels
        rows = kernels.quantize_rows(
            kernels.rms_norm(hidden_TE, self._layers[layer].post_norm_E, self._eps)
        )
        gated_TI = kernels.silu_mul(kernels.int8_matmul(rows, self._gate_up[layer]))
        hidden_TE.add_(kernels.int8_matmul(kernels.quantize_rows(gated_TI), self._down[layer]))

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """See Executor."""
        kernels = self._kernels
        rows = kernels.quantize_rows(kernels.rms_norm(hidden_TE, self._final_norm_E, self._eps))
        return kernels.int8_matmul(rows, self._lm_head)

    @property
    def packed_weights(self) -> list[Tensor]:
        """See Executor."""
        packed = [*self._qkv, *self._out, *self._gate_up, *self._down, self._lm_head]
        return [p.weight for p in packed]
