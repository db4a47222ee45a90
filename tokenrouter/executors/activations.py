"""How large the inputs of a model's linears get, channel by channel, over some text: what scales are calibrated on.

T tokens of all sequences, B sequences, E hidden size, O fused q, k, v outputs, A attention outputs, I intermediate,
S slots, P planes (key heads, then value heads), D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenrouter.kernels import ReferenceKernels
from tokenrouter.models import Decoder, ForwardTimes, LoadedModel
from tokenrouter.models.weights import LayerWeights
from tokenrouter.types import AttentionBatch, ForwardBatch, KVAccess, Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class InputMaxima:
    """Per input channel of one layer's linears, the largest magnitude over all tokens; float32.

    Attributes:
        qkv_E: of the normed input of q, k and v.
        gate_up_E: of the normed input of gate and up.
        down_I: of ``silu(gate) * up``.
    """

    qkv_E: Tensor
    gate_up_E: Tensor
    down_I: Tensor


def input_maxima(model: LoadedModel, sequences: Sequence[Sequence[int]]) -> list[InputMaxima]:
    """Runs ``sequences`` through ``model`` once, in float32, a layer's weights at a time.

    The operators are the reference's, so that the figures do not depend on the backend that they are used with.

    Args:
        model: of any dtype; read only.
        sequences: token ids, all of one length, at most the model's longest; none sees another.

    Returns:
        One per layer. A channel is NaN where an activation was.
    """
    num, length = len(sequences), len(sequences[0])
    ids_T = torch.tensor(sequences).flatten()
    weights = model.weights
    # The embeddings of these very tokens, which then have the ids 0 .. T-1: the table is not converted as a whole.
    wide = replace(
        model,
        dtype=torch.float32,
        weights=replace(
            weights,
            embed_VE=weights.embed_VE[ids_T].float(),
            cos_ND=weights.cos_ND[:length].float(),
            sin_ND=weights.sin_ND[:length].float(),
        ),
    )
    recorder, config = _Recorder(model), model.config
    # A layer's entries are read in that layer alone, so that all share one tensor.
    kv_SPD = torch.zeros(num * length + 1, config.kv_planes, config.head_dim)
    Decoder(wide, ReferenceKernels()).forward(
        _prompts(num, length, config.num_layers),
        {"high": recorder},
        [kv_SPD] * config.num_layers,
        ForwardTimes(),
    )
    return recorder.maxima


def _prompts(num: int, length: int, num_layers: int) -> ForwardBatch:
    """``num`` whole prompts side by side, the ids and slots of whose tokens are 0 .. T-1."""
    rows_T = torch.arange(num * length)
    lengths_B = torch.full((num,), length)
    attention = AttentionBatch(
        query_rows_T=rows_T,
        num_queries_B=lengths_B,
        query_start_B=torch.zeros(num, dtype=torch.int64),
        row_B=torch.arange(num),
        num_keys_B=lengths_B,
        slots_RN=rows_T.view(num, length),
    )
    return ForwardBatch(
        ids_T=rows_T,
        positions_T=torch.arange(length).repeat(num),
        segments=((Segment(0, num * length, "high"),),) * num_layers,
        kv=(KVAccess(slots_T=rows_T, attention=attention),),
    )


class _Recorder:
    """TokenOps in float32 that keep the maxima of what their linears are given."""

    def __init__(self, model: LoadedModel) -> None:
        self.maxima: list[InputMaxima] = []
        self._layers = model.weights.layers
        self._config = model.config

    def qkv(self, layer: int, hidden_TE: Tensor, out_TO: Tensor) -> None:
        """See TokenOps."""
        self._weights = _float32(self._layers[layer])
        w, config = self._weights, self._config
        self._qkv_TE = self._norm(hidden_TE, w.input_norm_E)
        out_TO.copy_(F.linear(self._qkv_TE, w.qkv_OE, w.qkv_bias_O))
        heads_THD = out_TO.unflatten(-1, (-1, config.head_dim))
        split = config.num_heads, config.num_kv_heads, config.num_kv_heads
        query_THD, key_THD, _ = heads_THD.split(split, 1)
        for part_THD, weight_D in ((query_THD, w.q_norm_D), (key_THD, w.k_norm_D)):
            if weight_D is not None:
                part_THD.copy_(self._norm(part_THD, weight_D))

    def finish_layer(
        self, layer: int, heads_TA: Tensor, hidden_TE: Tensor, next_qkv_TO: Tensor | None = None
    ) -> None:
        """See TokenOps."""
        w = self._weights
        hidden_TE += F.linear(heads_TA, w.out_EA, w.out_bias_E)
        normed_TE = self._norm(hidden_TE, w.post_norm_E)
        gate_TI, up_TI = F.linear(normed_TE, w.gate_up_JE, w.gate_up_bias_J).chunk(2, -1)
        gated_TI = F.silu(gate_TI) * up_TI
        hidden_TE += F.linear(gated_TI, w.down_EI, w.down_bias_E)
        inputs = self._qkv_TE, normed_TE, gated_TI
        qkv_E, gate_up_E, down_I = (x_TK.abs().amax(0) for x_TK in inputs)
        self.maxima.append(InputMaxima(qkv_E=qkv_E, gate_up_E=gate_up_E, down_I=down_I))
        if next_qkv_TO is not None:
            self.qkv(layer + 1, hidden_TE, next_qkv_TO)

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """See TokenOps. Nobody asks for them here."""
        raise NotImplementedError

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)


def _float32(layer: LayerWeights) -> LayerWeights:
    present = {f.name: getattr(layer, f.name) for f in fields(layer)}
    return replace(layer, **{name: w.float() for name, w in present.items() if w is not None})
