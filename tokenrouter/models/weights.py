"""A checkpoint's weights in the form that executors take: q, k, v fused, gate and up fused, layer by layer.

E hidden size, O fused q, k, v outputs, A attention outputs (H D), J fused gate and up, I intermediate, V vocabulary,
D head size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from tokenrouter.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One decoder layer. Biases and head norms are None where the family has none."""

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
    """All weights of a decoder; ``lm_head_VE`` is ``embed_VE`` itself when they are tied."""

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
    """Fuses a transformers state dict of a supported family; raises ValueError when a tensor is missing."""
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

    def fuse(names: list[str], suffix: str) -> Any:
        parts = [state.get(name + suffix) for name in names]
        present = [part for part in parts if part is not None]
        return torch.cat(present) if len(present) == len(parts) else None

    qkv = [attn + "q_proj.", attn + "k_proj.", attn + "v_proj."]
    gate_up = [mlp + "gate_proj.", mlp + "up_proj."]
    return LayerWeights(
        input_norm_E=state[prefix + "input_layernorm.weight"],
        qkv_OE=torch.cat([state[name + "weight"] for name in qkv]),
        qkv_bias_O=fuse(qkv, "bias"),
        q_norm_D=state.get(attn + "q_norm.weight"),
        k_norm_D=state.get(attn + "k_norm.weight"),
        out_EA=state[attn + "o_proj.weight"],
        out_bias_E=state.get(attn + "o_proj.bias"),
        post_norm_E=state[prefix + "post_attention_layernorm.weight"],
        gate_up_JE=torch.cat([state[name + "weight"] for name in gate_up]),
        gate_up_bias_J=fuse(gate_up, "bias"),
        down_EI=state[mlp + "down_proj.weight"],
        down_bias_E=state.get(mlp + "down_proj.bias"),
    )
