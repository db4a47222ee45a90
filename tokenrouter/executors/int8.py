"""The plain low path: W8A8, one scale per output channel and one per token.

These are LLM.int8's vector-wise scales (Dettmers et al. 2022, arXiv:2208.07339) without the outlier split.
T tokens of a slice, E hidden size, O fused q, k, v outputs, A attention outputs, V vocabulary.
"""

import torch
from torch import Tensor

from tokenrouter.executors.base import Executor
from tokenrouter.executors.packing import PackedModel, RowBuffers
from tokenrouter.kernels import QuantizedRows
from tokenrouter.kernels.base import scale_dtype


class Int8Executor(Executor):
    """Int8 products of all body linears and lm_head. q, k, v share one quantisation of their input, so do gate, up."""

    name = "int8"

    def __init__(self, packed: PackedModel) -> None:
        super().__init__(packed)
        self._linears = packed.int8
        config, self._dtype = packed.model.config, packed.model.dtype
        self._buffers = RowBuffers(
            {
                "hidden_q": (config.hidden_size, torch.int8),
                "heads_q": (config.num_heads * config.head_dim, torch.int8),
                "gated": (config.intermediate_size, self._dtype),
                "gated_q": (config.intermediate_size, torch.int8),
                "scale": (1, scale_dtype(self._dtype)),
            }
        )

    def qkv(self, layer: int, hidden_TE: Tensor, out_TO: Tensor) -> None:
        """See Executor."""
        buffers = self._buffers.rows(hidden_TE.shape[0])
        rows = QuantizedRows(buffers["hidden_q"], buffers["scale"], self._dtype)
        norm_E = self._layers[layer].input_norm_E
        self._kernels.rms_norm_quantize(hidden_TE, norm_E, self._eps, out=rows)
        self._kernels.int8_matmul(rows, self._linears.qkv[layer], out=out_TO)
        self._norm_heads(layer, out_TO)

    def attention_out(self, layer: int, heads_TA: Tensor, hidden_TE: Tensor) -> None:
        """See Executor."""
        buffers, kernels = self._buffers.rows(hidden_TE.shape[0]), self._kernels
        rows = QuantizedRows(buffers["heads_q"], buffers["scale"], self._dtype)
        kernels.quantize_rows(heads_TA, out=rows)
        kernels.int8_matmul(rows, self._linears.out[layer], out=hidden_TE, accumulate=True)

    def mlp(self, layer: int, hidden_TE: Tensor) -> None:
        """See Executor."""
        buffers, kernels = self._buffers.rows(hidden_TE.shape[0]), self._kernels
        rows = QuantizedRows(buffers["hidden_q"], buffers["scale"], self._dtype)
        norm_E = self._layers[layer].post_norm_E
        kernels.rms_norm_quantize(hidden_TE, norm_E, self._eps, out=rows)
        kernels.int8_matmul(rows, self._linears.gate_up[layer], out=buffers["gated"])
        gated = QuantizedRows(buffers["gated_q"], buffers["scale"], self._dtype)
        kernels.quantize_rows(buffers["gated"], out=gated)
        kernels.int8_matmul(gated, self._linears.down[layer], out=hidden_TE, accumulate=True)

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """See Executor."""
        rows = self._kernels.rms_norm_quantize(hidden_TE, self._final_norm_E, self._eps)
        return self._kernels.int8_matmul(rows, self._linears.lm_head)

    @property
    def packed_weights(self) -> list[Tensor]:
        """See Executor."""
        return self._linears.weights
