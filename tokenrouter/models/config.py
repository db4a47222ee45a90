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
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Geometry of a Llama-family decoder.

    Attributes:
        family: llama, mistral, qwen2 or qwen3.
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        num_heads: query heads.
        num_kv_heads: key heads, and as many value heads; divides ``num_heads``.
        head_dim: size of a head, even; need not be ``hidden_size / num_heads``.
        vocab_size: rows of the embedding.
        rms_norm_eps: of every norm.
        max_model_len: longest sequence in tokens, prompt and output together.
        windows: per layer the sliding window in tokens, or None for full attention. A token sees itself and the
            ``window - 1`` before it.
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
    def qkv_size(self) -> int:
        """Features of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def kv_planes(self) -> int:
        """Key heads plus value heads: rows of ``[head_dim]`` per slot and layer."""
        return 2 * self.num_kv_heads


def check_architecture(names: list[str] | None, model_type: str | None) -> str:
    """The family behind a config's ``architectures`` and ``model_type``, which must agree where both are given.

    Raises:
        ValueError: any other architecture, with its name and the list of supported ones.
    """
    for name in names or []:
        if name in SUPPORTED and SUPPORTED[name] == model_type:
            return SUPPORTED[name]
    if not names and model_type in SUPPORTED.values():
        return str(model_type)
    found = f"{', '.join(names)} of " if names else ""
    raise ValueError(
        f"unsupported architecture: {found}model_type {model_type!r}; supported: {', '.join(SUPPORTED)}"
    )


def from_hf(
    hf_config: Any, *, max_model_len: int | None = None, eos_token_ids: frozenset[int]
) -> ModelConfig:
    """Reads a transformers config. No weights are needed, so that a refusal costs no load.

    Args:
        hf_config: of a supported architecture.
        max_model_len: a shorter limit in tokens than the model's own.
        eos_token_ids: ids that end a generation.

    Raises:
        ValueError: an architecture, option or size that the decoder does not have; ``max_model_len`` out of range.
    """
    family = check_architecture(hf_config.architectures, hf_config.model_type)
    _check_options(hf_config)
    trained_len = _trained_len(hf_config)
    if max_model_len is not None and not 1 <= max_model_len <= trained_len:
        raise ValueError(
            f"max_model_len {max_model_len} must lie in 1 .. {trained_len}, the model's own length"
        )
    length = max_model_len or trained_len
    num_heads = int(hf_config.num_attention_heads)
    config = ModelConfig(
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
        windows=_windows(hf_config, family, length),
        eos_token_ids=eos_token_ids,
    )
    _check_heads(config)
    return config


def _check_options(hf_config: Any) -> None:
    """Refuses by name what would change the arithmetic, or how the weights are stored."""
    if quantization := getattr(hf_config, "quantization_config", None):
        values = quantization if isinstance(quantization, dict) else vars(quantization)
        raise ValueError(
            f"unsupported quantization_config of the method {values.get('quant_method')!r}; supported: "
            "checkpoints in float32, float16 or bfloat16, and GGUF files. Low precision is an executor's business"
        )
    if hf_config.hidden_act != "silu":
        raise ValueError(f"unsupported hidden_act {hf_config.hidden_act!r}; supported: silu")
    rope = hf_config.rope_parameters or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(
            f"unsupported rope_parameters per layer type ({', '.join(rope)}); supported: one RoPE for all layers"
        )
    if (rope_type := rope.get("rope_type", "default")) not in ROPE_TYPES:
        raise ValueError(f"unsupported rope_type {rope_type!r}; supported: {', '.join(ROPE_TYPES)}")
    partial = rope.get("partial_rotary_factor", getattr(hf_config, "partial_rotary_factor", None))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"unsupported partial_rotary_factor {partial}; supported: 1.0")


def _trained_len(hf_config: Any) -> int:
    length = int(hf_config.max_position_embeddings)
    rope = hf_config.rope_parameters or {}
    if rope.get("rope_type") == "dynamic":
        return int(rope.get("original_max_position_embeddings") or length)
    return length


def _check_heads(config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_key_value_heads {config.num_kv_heads} must divide num_attention_heads {config.num_heads}"
        )
    if config.head_dim % 2:
        raise ValueError(f"head_dim {config.head_dim} must be even: RoPE turns pairs")


def _windows(hf_config: Any, family: str, length: int) -> tuple[int | None, ...]:
    """As each family reads its options: Llama none of them, Mistral one for all layers, Qwen layer by layer."""
    num_layers = int(hf_config.num_hidden_layers)
    if family == "llama":
        return (None,) * num_layers
    window = getattr(hf_config, "sliding_window", None)
    kinds = ["sliding_attention"] * num_layers
    if family in ("qwen2", "qwen3"):
        kinds = list(hf_config.layer_types)
        if unknown := sorted(set(kinds) - set(LAYER_TYPES)):
            raise ValueError(
                f"unsupported layer_types {', '.join(unknown)}; supported: {', '.join(LAYER_TYPES)}"
            )
        if window is None and "sliding_attention" in kinds:
            raise ValueError("layer_types has sliding_attention, but no sliding_window is in use")
    if window is not None and window < 1:
        raise ValueError(f"sliding_window {window} must be at least 1, or null")
    seen = int(window) if window is not None and window < length else None
    return tuple(seen if kind == "sliding_attention" else None for kind in kinds)
