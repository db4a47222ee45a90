"""What the decoder needs to know of a checkpoint, read from its transformers config."""

from dataclasses import dataclass
from typing import Any

SUPPORTED = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# RoPE types whose frequencies do not depend on the sequence. `dynamic` equals `default` up to the trained length.
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Geometry of a Llama-family decoder.

    Attributes:
        family: llama, mistral, qwen2 or qwen3.
        windows: per layer the sliding window in tokens, or None for full attention.
        max_model_len: longest sequence, prompt and output together.
        eos_token_ids: ids that end a generation.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_model_len: int
    windows: tuple[int | None, ...]
    eos_token_ids: frozenset[int]

    @property
    def kv_planes(self) -> int:
        """Key heads plus value heads: rows of ``[head_dim]`` per slot and layer."""
        return 2 * self.num_kv_heads


def check_supported(hf_config: Any) -> str:
    """The family of a transformers config; refuses any other by name."""
    names = list(getattr(hf_config, "architectures", None) or [])
    by_type = {family: family for family in SUPPORTED.values()}
    for name in names:
        if name in SUPPORTED:
            return SUPPORTED[name]
    if not names and hf_config.model_type in by_type:
        return by_type[hf_config.model_type]
    found = ", ".join(names) or f"model_type {hf_config.model_type!r}"
    raise ValueError(f"unsupported architecture: {found}; supported: {', '.join(SUPPORTED)}")


def from_hf(
    hf_config: Any, *, max_model_len: int | None = None, eos_token_ids: frozenset[int]
) -> ModelConfig:
    """Reads a transformers config; raises ValueError for an architecture or option that the decoder does not have."""
    family = check_supported(hf_config)
    if hf_config.hidden_act != "silu":
        raise ValueError(f"unsupported hidden_act {hf_config.hidden_act!r}; supported: silu")
    rope_type = (hf_config.rope_parameters or {}).get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"unsupported rope_type {rope_type!r}; supported: {', '.join(ROPE_TYPES)}")
    trained_len = int(hf_config.max_position_embeddings)
    if rope_type == "dynamic":
        trained_len = int(
            hf_config.rope_parameters.get("original_max_position_embeddings") or trained_len
        )
    if max_model_len is not None and not 1 <= max_model_len <= trained_len:
        raise ValueError(
            f"max_model_len {max_model_len} must lie in 1 .. {trained_len}, the model's own length"
        )
    length = max_model_len or trained_len
    num_heads = int(hf_config.num_attention_heads)
    return ModelConfig(
        family=family,
        num_layers=int(hf_config.num_hidden_layers),
        hidden_size=int(hf_config.hidden_size),
        intermediate_size=int(hf_config.intermediate_size),
        num_heads=num_heads,
        num_kv_heads=int(getattr(hf_config, "num_key_value_heads", None) or num_heads),
        head_dim=int(getattr(hf_config, "head_dim", None) or hf_config.hidden_size // num_heads),
        vocab_size=int(hf_config.vocab_size),
        rms_norm_eps=float(hf_config.rms_norm_eps),
        max_model_len=length,
        windows=tuple(
            _window(hf_config, layer, length) for layer in range(hf_config.num_hidden_layers)
        ),
        eos_token_ids=eos_token_ids,
    )


def _window(hf_config: Any, layer: int, length: int) -> int | None:
    window = getattr(hf_config, "sliding_window", None)
    if (
        window is None
        or getattr(hf_config, "use_sliding_window", True) is False
        or window >= length
    ):
        return None
    layer_types = getattr(hf_config, "layer_types", None)
    if layer_types is not None and layer_types[layer] != "sliding_attention":
        return None
    return int(window)
