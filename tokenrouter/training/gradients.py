"""The decoder as a plain float32 function, for labels: gradients, what rounding changes, and routes at will.

Layers are run again on the way back, one at a time, so that a window of 2,048 tokens needs the memory of one layer.

N tokens of a window, B routings of it, D gradients, L layers, P the four linears of a layer, R rows, E hidden size,
H query heads, G key heads, K head size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenrouter.kernels import KernelSet, select
from tokenrouter.models import LoadedModel
from tokenrouter.training.layers import LINEARS, HighLayers, LowLayer, gated
from tokenrouter.training.low_path import LowPath

HEAD_ROWS = 128  # rows of logits at a time
Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The high path's residual stream over one window, without gradients.

    Attributes:
        ids_N: int64.
        inputs: float32 ``[N, E]`` in front of each layer, and behind the last.
    """

    ids_N: Tensor
    inputs: tuple[Tensor, ...]


class LayerHeads(NamedTuple):
    """Attention of one layer over a window: rotated queries, keys, values, result, and a gradient at the result."""

    layer: int
    q_HNK: Tensor
    k_GNK: Tensor
    v_GNK: Tensor
    result_HNK: Tensor
    gradient_HNK: Tensor


class DifferentiableDecoder:
    """A model of a supported family in float32, beside its low path.

    Args:
        model: in float32; read only.
        low: its low path, which is packed here, a layer at a time.
        kernels: the operators of the low path; by default the fastest that this machine has.

    Raises:
        ValueError: the model is in another dtype.
    """

    def __init__(self, model: LoadedModel, low: LowPath, kernels: KernelSet | None = None) -> None:
        if model.dtype != torch.float32:
            raise ValueError(
                f"labels are computed in float32 and the model is in {model.dtype}: load it with dtype='float32'"
            )
        self.model, self.config = model, model.config
        self._high = HighLayers(model)
        kernels, eps = kernels or select(dtype=torch.float32), model.config.rms_norm_eps
        layers = zip(model.weights.layers, low.layers(), strict=True)
        self._low = [LowLayer(own, folded, low.product, eps, kernels) for own, folded in layers]

    @torch.no_grad()
    def trace(self, ids_N: Tensor) -> Trace:
        """Runs a window on the high path.

        Args:
            ids_N: int64, at least one and at most the model's longest.

        Raises:
            ValueError: another length, an id outside the vocabulary, or activations that are not finite.
        """
        self._check(ids_N)
        inputs = [self.model.weights.embed_VE[ids_N]]
        for layer in range(self.config.num_layers):
            inputs.append(self._high.run(layer, inputs[-1]).hidden_NE)
        if not inputs[-1].isfinite().all():
            raise ValueError(
                f"the activations of model {self.model.name!r} are not finite: its weights hold NaN or overflow"
            )
        return Trace(ids_N=ids_N, inputs=tuple(inputs))

    @torch.no_grad()
    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Final norm and lm_head of any rows behind the last layer: float32 ``[R, V]``."""
        weights = self.model.weights
        return F.linear(self._high.norm(hidden_RE, weights.final_norm_E), weights.lm_head_VE)

    @torch.no_grad()
    def routed(self, ids_N: Tensor, is_low_BLN: Tensor) -> Tensor:
        """Runs a window B times, each layer and token on its own path, as the engine does it.

        Args:
            ids_N: int64.
            is_low_BLN: bool; L and N may be 1, which counts for all.

        Returns:
            Residual streams behind the last layer, float32 ``[B, N, E]``.

        Raises:
            ValueError: a length or an id as in ``trace``.
        """
        self._check(ids_N)
        num_layers = self.config.num_layers
        is_low_BLN = is_low_BLN.expand(-1, num_layers, len(ids_N))
        hidden_BNE = self.model.weights.embed_VE[ids_N].expand(len(is_low_BLN), -1, -1)
        for layer in range(num_layers):
            hidden_BNE = self._mixed(layer, hidden_BNE, is_low_BLN[:, layer, :, None])
        return hidden_BNE

    @torch.no_grad()
    def drawn_gradients(self, trace: Trace, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draws the token after every position from the model, ``num_draws`` times.

        Returns:
            The gradients of the summed log-probabilities with respect to the last residual stream, ``[D, N, E]``.
        """
        hidden_NE, head_VE = trace.inputs[-1], self.model.weights.lm_head_VE
        parts = []
        for rows_RE in hidden_NE.split(HEAD_ROWS):
            p_RV = self.logits(rows_RE).softmax(-1)
            drawn_RD = torch.multinomial(p_RV, num_draws, replacement=True, generator=generator)
            parts.append(head_VE[drawn_RD.t()] - p_RV @ head_VE)
        return self._through_final_norm(hidden_NE, torch.cat(parts, 1))

    @torch.no_grad()
    def text_gradients(self, trace: Trace) -> Tensor:
        """The same of the log-probability of the window's own tokens, ``[1, N, E]``; the last has no successor."""
        hidden_NE, head_VE = trace.inputs[-1], self.model.weights.lm_head_VE
        parts = []
        for next_R, rows_RE in zip(
            trace.ids_N[1:].split(HEAD_ROWS), hidden_NE[:-1].split(HEAD_ROWS), strict=False
        ):
            parts.append(head_VE[next_R] - self.logits(rows_RE).softmax(-1) @ head_VE)
        parts.append(torch.zeros_like(hidden_NE[:1]))
        return self._through_final_norm(hidden_NE, torch.cat(parts)[None])

    def effects(self, trace: Trace, gradients_DNE: Tensor) -> Tensor:
        """What rounding one linear for one token changes, to first order.

        Args:
            trace: of the window.
            gradients_DNE: of D functions, with respect to the last residual stream.

        Returns:
            Float32 ``[D, L, P, N]``: the inner product of a function's gradient at the linear's output with the low
            path's output minus the high one's, both on the high path's own input.
        """
        num_layers = self.config.num_layers
        effects_DLPN = torch.empty(
            len(gradients_DNE), num_layers, len(LINEARS), len(trace.ids_N), dtype=torch.float32
        )
        gradients = list(gradients_DNE)
        for layer in reversed(range(num_layers)):
            hidden_NE = trace.inputs[layer].detach().requires_grad_()
            with torch.enable_grad():
                high = self._high.run(layer, hidden_NE)
            with torch.no_grad():
                outputs = self._low[layer].linears(hidden_NE, high)
                differences = [a - b for a, b in zip(outputs, high.linears, strict=True)]
            for index, gradient_NE in enumerate(gradients):
                gradients[index], *at_outputs = torch.autograd.grad(
                    high.hidden_NE, (hidden_NE, *high.linears), gradient_NE, retain_graph=True
                )
                for linear, pair in enumerate(zip(at_outputs, differences, strict=True)):
                    effects_DLPN[index, layer, linear] = torch.linalg.vecdot(*pair)
        return effects_DLPN

    @torch.no_grad()
    def queries_keys(self, trace: Trace) -> Iterator[tuple[Tensor, Tensor]]:
        """Rotated queries ``[H, N, K]`` and keys ``[G, N, K]``, layer by layer."""
        for layer in range(self.config.num_layers):
            q_HNK, k_GNK, _ = self._high.heads(layer, self._high.qkv(layer, trace.inputs[layer]))
            yield q_HNK, k_GNK

    @torch.no_grad()
    def attention(self, trace: Trace, gradient_NE: Tensor) -> Iterator[LayerHeads]:
        """Every layer's attention, from the last layer to the first.

        Args:
            trace: of the window.
            gradient_NE: of one function, with respect to the last residual stream.
        """
        for layer in reversed(range(self.config.num_layers)):
            hidden_NE = trace.inputs[layer].detach().requires_grad_()
            with torch.enable_grad():
                high = self._high.run(layer, hidden_NE)
            gradient_NE, at_heads_NA = torch.autograd.grad(
                high.hidden_NE, (hidden_NE, high.heads_NA), gradient_NE.to(high.hidden_NE.dtype)
            )
            q_HNK, k_GNK, v_GNK = self._high.heads(layer, high.linears[0].detach())
            result, gradient = (
                x.detach().unflatten(-1, (len(q_HNK), -1)).transpose(0, 1)
                for x in (high.heads_NA, at_heads_NA)
            )
            yield LayerHeads(layer, q_HNK, k_GNK, v_GNK, result, gradient)

    def _check(self, ids_N: Tensor) -> None:
        limit, vocab_size = self.config.max_model_len, self.config.vocab_size
        if not 1 <= len(ids_N) <= limit:
            raise ValueError(
                f"a window has 1 to {limit} tokens (the model's length), got {len(ids_N)}"
            )
        if ids_N.min() < 0 or ids_N.max() >= vocab_size:
            raise ValueError(
                f"token ids lie in 0 .. {vocab_size - 1}, got {int(ids_N.min())} to {int(ids_N.max())}: were they "
                "encoded with another model's tokenizer?"
            )

    def _mixed(self, layer: int, hidden_BNE: Tensor, is_low_BN1: Tensor) -> Tensor:
        """A layer whose tokens run on the path that they are given; the dear one runs for its own tokens only."""
        high, low = self._high, self._low[layer]
        if not is_low_BN1.any():
            return high.run(layer, hidden_BNE).hidden_NE
        is_high_BN = ~is_low_BN1[..., 0]

        def on_paths(x: Tensor, on_low: Linear, on_high: Linear) -> Tensor:
            result = on_low(x)
            if is_high_BN.any():
                result[is_high_BN] = on_high(x[is_high_BN])
            return result

        def high_mlp(middle_RE: Tensor) -> Tensor:
            return high.down(layer, gated(high.gate_up(layer, middle_RE)))

        qkv_BNO = on_paths(hidden_BNE, low.qkv, partial(high.qkv, layer))
        heads_BNA = high.attend(layer, qkv_BNO)
        middle_BNE = hidden_BNE + on_paths(heads_BNA, low.out, partial(high.out, layer))
        return middle_BNE + on_paths(middle_BNE, low.mlp, high_mlp)

    def _through_final_norm(self, hidden_NE: Tensor, gradients_DNE: Tensor) -> Tensor:
        hidden_NE = hidden_NE.detach().requires_grad_()
        with torch.enable_grad():
            normed_NE = self._high.norm(hidden_NE, self.model.weights.final_norm_E)
        found = (
            torch.autograd.grad(normed_NE, hidden_NE, gradient_NE, retain_graph=True)[0]
            for gradient_NE in gradients_DNE
        )
        return torch.stack(list(found))
