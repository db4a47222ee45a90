"""One layer of a model in float32, on the high path and on the low one, as plain functions.

N tokens of a window, T rows, E hidden size, O fused q, k, v outputs, J fused gate and up, I intermediate, A attention
outputs, K head size. Tensors may have dimensions in front of N.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenrouter.executors.packing import packer
from tokenrouter.kernels import KernelSet, Norm, PackedWeights, Product
from tokenrouter.models import LoadedModel
from tokenrouter.models.weights import LayerWeights

LINEARS = ("qkv", "out", "gate_up", "down")
"""The linears of a layer that a route chooses for; lm_head is an option of the pool and always high here."""


class HighOutputs(NamedTuple):
    """What the high path computes in a layer.

    Attributes:
        linears: outputs in the order of ``LINEARS``.
        heads_NA: attention's result, the input of out.
        middle_NE: the residual stream between attention and MLP.
        gated_NI: ``silu(gate) * up``, the input of down.
        hidden_NE: the residual stream behind the layer.
    """

    linears: tuple[Tensor, Tensor, Tensor, Tensor]
    heads_NA: Tensor
    middle_NE: Tensor
    gated_NI: Tensor
    hidden_NE: Tensor


class HighLayers:
    """The layers of ``model``, which is in float32; differentiable in the residual stream."""

    def __init__(self, model: LoadedModel) -> None:
        self.config, self.weights = model.config, model.weights

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension."""
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def qkv(self, layer: int, hidden_NE: Tensor) -> Tensor:
        """Fused projection ``[N, O]``, before the norms of heads."""
        w = self.weights.layers[layer]
        return F.linear(self.norm(hidden_NE, w.input_norm_E), w.qkv_OE, w.qkv_bias_O)

    def out(self, layer: int, heads_NA: Tensor) -> Tensor:
        """Output projection ``[N, E]``."""
        w = self.weights.layers[layer]
        return F.linear(heads_NA, w.out_EA, w.out_bias_E)

    def gate_up(self, layer: int, middle_NE: Tensor) -> Tensor:
        """Norm and fused projection ``[N, J]``."""
        w = self.weights.layers[layer]
        return F.linear(self.norm(middle_NE, w.post_norm_E), w.gate_up_JE, w.gate_up_bias_J)

    def down(self, layer: int, gated_NI: Tensor) -> Tensor:
        """The MLP's output ``[N, E]``."""
        w = self.weights.layers[layer]
        return F.linear(gated_NI, w.down_EI, w.down_bias_E)

    def run(self, layer: int, hidden_NE: Tensor) -> HighOutputs:
        """The whole layer."""
        qkv_NO = self.qkv(layer, hidden_NE)
        heads_NA = self.attend(layer, qkv_NO)
        out_NE = self.out(layer, heads_NA)
        middle_NE = hidden_NE + out_NE
        gate_up_NJ = self.gate_up(layer, middle_NE)
        gated_NI = gated(gate_up_NJ)
        down_NE = self.down(layer, gated_NI)
        linears = qkv_NO, out_NE, gate_up_NJ, down_NE
        return HighOutputs(linears, heads_NA, middle_NE, gated_NI, middle_NE + down_NE)

    def heads(self, layer: int, qkv_NO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value heads ``[heads, N, K]``: normed where the family does, q and k rotated."""
        config, w, num_tokens = self.config, self.weights.layers[layer], qkv_NO.shape[-2]
        split = config.num_heads, config.num_kv_heads, config.num_kv_heads
        q, k, value = qkv_NO.unflatten(-1, (-1, config.head_dim)).transpose(-2, -3).split(split, -3)
        if w.q_norm_D is not None and w.k_norm_D is not None:
            q, k = self.norm(q, w.q_norm_D), self.norm(k, w.k_norm_D)
        cos_NK, sin_NK = self.weights.cos_ND[:num_tokens], self.weights.sin_ND[:num_tokens]
        q, k = (x * cos_NK + x.roll(config.head_dim // 2, -1) * sin_NK for x in (q, k))
        return q, k, value

    def attend(self, layer: int, qkv_NO: Tensor) -> Tensor:
        """Causal attention ``[N, A]`` at positions 0 .. N-1, in the layer's window."""
        q, k, value = self.heads(layer, qkv_NO)
        window, num_tokens = self.config.windows[layer], q.shape[-2]
        mask_NN = None
        if window is not None and window < num_tokens:
            age_NN = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
            mask_NN = (age_NN >= 0) & (age_NN < window)
        batched = [x if x.dim() > 3 else x[None] for x in (q, k, value)]
        result = F.scaled_dot_product_attention(
            batched[0],
            batched[1],
            batched[2],
            attn_mask=mask_NN,
            is_causal=mask_NN is None,
            enable_gqa=self.config.num_heads != self.config.num_kv_heads,
        )
        return result.transpose(-2, -3).flatten(-2).reshape(*qkv_NO.shape[:-1], -1)


class LowLayer:
    """A layer of the low path, rounded and multiplied as the executors do it; not differentiable.

    Args:
        own: the model's layer.
        low: the layer that the path rounds.
        product: what its linears are.
        eps: of the norms.
        kernels: the operators.
    """

    def __init__(
        self,
        own: LayerWeights,
        low: LayerWeights,
        product: Product,
        eps: float,
        kernels: KernelSet,
    ) -> None:
        pack = packer(kernels, product)
        self._kernels, self._product = kernels, product
        self._input_norm = Norm(low.input_norm_E.float(), eps)
        self._post_norm = Norm(low.post_norm_E.float(), eps)
        self._qkv = pack(low.qkv_OE, low.qkv_bias_O)
        self._out = pack(low.out_EA, low.out_bias_E)
        self._gate_up = pack(low.gate_up_JE, low.gate_up_bias_J)
        self._down = pack(low.down_EI, low.down_bias_E)
        self._scale_I = _column_ratio(low.down_EI, own.down_EI)

    def qkv(self, hidden_NE: Tensor) -> Tensor:
        """As in HighLayers."""
        return self._project(hidden_NE, self._qkv, self._input_norm)

    def out(self, heads_NA: Tensor) -> Tensor:
        """As in HighLayers."""
        return self._project(heads_NA, self._out)

    def mlp(self, middle_NE: Tensor) -> Tensor:
        """Norm, gate and up, down: ``[N, E]``."""
        return self._project(
            gated(self._project(middle_NE, self._gate_up, self._post_norm)), self._down
        )

    def linears(self, hidden_NE: Tensor, high: HighOutputs) -> tuple[Tensor, ...]:
        """Each linear's output on the high path's own input, in its units and the order of ``LINEARS``.

        Scales between up and down are taken out again.
        """
        gate_NI, up_NI = self._project(high.middle_NE, self._gate_up, self._post_norm).chunk(2, -1)
        return (
            self.qkv(hidden_NE),
            self.out(high.heads_NA),
            torch.cat([gate_NI, up_NI * self._scale_I], -1),
            self._project(high.gated_NI / self._scale_I, self._down),
        )

    def _project(self, x: Tensor, packed: PackedWeights, norm: Norm | None = None) -> Tensor:
        rows_TK = x.detach().flatten(0, -2).contiguous()
        y_TN = self._kernels.project(self._product, rows_TK, packed, norm=norm)
        return y_TN.view(*x.shape[:-1], -1)


def gated(gate_up_NJ: Tensor) -> Tensor:
    """``silu(gate) * up``: ``[N, I]``."""
    gate_NI, up_NI = gate_up_NJ.chunk(2, -1)
    return F.silu(gate_NI) * up_NI


def _column_ratio(low_EI: Tensor, own_EI: Tensor) -> Tensor:
    """By what each column was multiplied, float32 ``[I]``; 1 for one of zeros."""
    low_I, own_I = (w.double().norm(dim=0) for w in (low_EI, own_EI))
    return torch.where(own_I > 0, low_I / own_I, 1.0).float()
