"""A checkpoint's weights in the form that executors take: q, k, v fused, gate and up fused, layer by layer.

E hidden size, O fused q, k, v outputs, A attention outputs (H D), J fused gate and up, I intermediate, V vocabulary,
D head size, N positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from tokenrouter.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One decoder layer. Norms, linears as ``[outputs, inputs]``, and biases; all in one dtype.

    Attributes:
        input_norm_E: RMS norm before attention.
        qkv_OE: query, key and value rows, in this order.
        qkv_bias_O: its bias, or None.
        q_norm_D: RMS norm of each query head (Qwen3), or None.
        k_norm_D: RMS norm of each key head (Qwen3), or None.
        out_EA: attention's output projection.
        out_bias_E: its bias, or None.
        post_norm_E: RMS norm before the MLP.
        gate_up_JE: gate rows, then up rows.
        gate_up_bias_J: its bias, or None.
        down_EI: the MLP's output projection.
        down_bias_E: its bias, or None.
    """

    input_norm_E: Tensor
    qkv_OE: Tensor
    qkv_bias_O: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    out_EA: Tensor
    out_bias_E: Tensor | None
    post_norm_E: Tensor
    gate_up_JE: Tensor
    gate_up_bias_J: Tensor | None
    down_EI: Tensor
    down_bias_E: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderWeights:
    """All weights of a decoder.

    Attributes:
        embed_VE: token embedding.
        layers: from the first to the last.
        final_norm_E: RMS norm before the head.
        lm_head_VE: ``embed_VE`` itself when they are tied.
        cos_ND: RoPE cosines by position.
        sin_ND: RoPE sines by position, the first half of each row negated.
    """

    embed_VE: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_E: Tensor
    lm_head_VE: Tensor
    cos_ND: Tensor
    sin_ND: Tensor

    def astype(self, dtype: torch.dtype) -> "DecoderWeights":
        """The same weights rounded to ``dtype``; tied stays tied."""
        embed_VE = self.embed_VE.to(dtype)
        tied = self.lm_head_VE is self.embed_VE
        return DecoderWeights(
            embed_VE=embed_VE,
            layers=tuple(_cast(layer, dtype) for layer in self.layers),
            final_norm_E=self.final_norm_E.to(dtype),
            lm_head_VE=embed_VE if tied else self.lm_head_VE.to(dtype),
            cos_ND=self.cos_ND.to(dtype),
            sin_ND=self.sin_ND.to(dtype),
        )


def _cast(layer: LayerWeights, dtype: torch.dtype) -> LayerWeights:
    present = {f.name: getattr(layer, f.name) for f in fields(layer)}
    return replace(layer, **{name: w.to(dtype) for name, w in present.items() if w is not None})


def from_state_dict(
    state: Mapping[str, Tensor], config: ModelConfig, rope: tuple[Tensor, Tensor]
) -> DecoderWeights:
    """Fuses a transformers state dict of a supported family.

    Args:
        state: tensors by transformers' name, all in one dtype. Those that are not fused are taken over, not copied.
        config: geometry of the decoder.
        rope: cosine and sine tables ``[N, D]``.

    Raises:
        ValueError: a tensor is missing, or only some of the biases that are fused are there.
    """
    try:
        embed_VE = state["model.embed_tokens.weight"]
        head_VE = state.get("lm_head.weight", embed_VE)
        return DecoderWeights(
            embed_VE=embed_VE,
            layers=tuple(_layer(state, f"model.layers.{i}.") for i in range(config.num_layers)),
            final_norm_E=state["model.norm.weight"],
            lm_head_VE=embed_VE if head_VE.data_ptr() == embed_VE.data_ptr() else head_VE,
            cos_ND=rope[0],
            sin_ND=rope[1],
        )
    except KeyError as error:
        raise ValueError(
            f"the checkpoint has no tensor {error.args[0]!r}, which {config.family} needs"
        ) from error


def _layer(state: Mapping[str, Tensor], prefix: str) -> LayerWeights:
    attn, mlp = prefix + "self_attn.", prefix + "mlp."

    def bias(names: list[str]) -> Tensor | None:
        present = [name + "bias" for name in names if name + "bias" in state]
        if present and len(present) < len(names):
            raise ValueError(
                f"the checkpoint has only {', '.join(present)} of the {len(names)} biases that are added together"
            )
        return torch.cat([state[name] for name in present]) if present else None

    qkv = [attn + "q_proj.", attn + "k_proj.", attn + "v_proj."]
    gate_up = [mlp + "gate_proj.", mlp + "up_proj."]
    return LayerWeights(
        input_norm_E=state[prefix + "input_layernorm.weight"],
        qkv_OE=torch.cat([state[name + "weight"] for name in qkv]),
        qkv_bias_O=bias(qkv),
        q_norm_D=state.get(attn + "q_norm.weight"),
        k_norm_D=state.get(attn + "k_norm.weight"),
        out_EA=state[attn + "o_proj.weight"],
        out_bias_E=state.get(attn + "o_proj.bias"),
        post_norm_E=state[prefix + "post_attention_layernorm.weight"],
        gate_up_JE=torch.cat([state[name + "weight"] for name in gate_up]),
        gate_up_bias_J=bias(gate_up),
        down_EI=state[mlp + "down_proj.weight"],
        down_bias_E=state.get(mlp + "down_proj.bias"),
    )
