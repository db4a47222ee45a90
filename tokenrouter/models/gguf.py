"""The transformers config of a GGUF file of a supported family, and what is refused before any weight is read.

transformers loads the weights, and passes over metadata by which llama.cpp changes its arithmetic, RoPE scaling among
it. So the config is read here, and what a file states and the decoder does not have is refused by the name of its key
or tensor.
"""

from collections.abc import Mapping
from typing import Any

from tokenrouter.models.gguf_header import ArrayLength, GGUFHeader

# GGUF's name of the architecture -> transformers' config class. Mistral files call themselves llama.
ARCHITECTURES = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
ROPE_TYPES = ("none", "linear", "yarn")
_EPS = "attention.layer_norm_rms_epsilon"
_SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    # llama.cpp does without it; transformers then leaves the rows of q and k in llama.cpp's order.
    "attention.head_count_kv": "num_key_value_heads",
}
_READ = {
    *_SIZES,
    "attention.key_length",
    "attention.value_length",
    _EPS,
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
}
# Keys without effect on the arithmetic, and those that have none while they hold this value.
_IGNORED = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
_NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}
# Tensors that only one family has.
_ONLY_IN = {
    "attn_q.bias": "qwen2",
    "attn_k.bias": "qwen2",
    "attn_v.bias": "qwen2",
    "attn_q_norm.weight": "qwen3",
    "attn_k_norm.weight": "qwen3",
}


def hf_config(header: GGUFHeader) -> Any:
    """The transformers config of a GGUF file, and a check that the file holds exactly the tensors of it.

    Raises:
        ValueError: an architecture, key, RoPE scaling or tensor that the decoder does not have, or one that is missing.
    """
    architecture = header.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"unsupported architecture: {architecture!r}; supported in GGUF files: {', '.join(ARCHITECTURES)}"
        )
    prefix = f"{architecture}."
    values = {
        key.removeprefix(prefix): value
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    _check_keys(prefix, values)
    import transformers

    config = getattr(transformers, ARCHITECTURES[architecture])(**_options(header, values))
    _check_tensors(header, config)
    return config


def _check_keys(prefix: str, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        known = key in _READ or key in _IGNORED or key in _NEUTRAL
        if not known or (key in _READ and isinstance(value, ArrayLength)):
            what = "one value per layer" if known else f"{value!r}"
            raise ValueError(
                f"unsupported GGUF key {prefix}{key} = {what}: the decoder has nothing of this kind; "
                "load the original checkpoint, or a file without it"
            )
        if key in _NEUTRAL and value != _NEUTRAL[key]:
            raise ValueError(
                f"unsupported GGUF key {prefix}{key} = {value!r}; supported: {_NEUTRAL[key]!r}"
            )
    if missing := [prefix + key for key in (*_SIZES, _EPS) if key not in values]:
        raise ValueError(f"the GGUF file has no key {', '.join(missing)}")


def _options(header: GGUFHeader, values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the config class. Defaults of absent keys are llama.cpp's."""
    sizes = {ours: int(values[theirs]) for theirs, ours in _SIZES.items()}
    if sizes["num_attention_heads"] < 1 or sizes["num_hidden_layers"] > len(header.tensors):
        raise ValueError(f"impossible sizes in the GGUF file: {sizes}")
    num_heads = sizes["num_attention_heads"]
    head_dim = int(values.get("attention.key_length", sizes["hidden_size"] // num_heads))
    for key in ("rope.dimension_count", "attention.value_length"):
        if values.get(key, head_dim) != head_dim:
            raise ValueError(
                f"unsupported {key} {values[key]} in the GGUF file; supported: the head size, {head_dim}"
            )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError("the GGUF file has no tensor 'token_embd.weight'")
    tokens = header.metadata
    ends = [tokens.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return {
        **sizes,
        "head_dim": head_dim,
        "rms_norm_eps": float(values[_EPS]),
        "rope_parameters": _rope(values),
        "vocab_size": embedding[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": tokens.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [end for end in dict.fromkeys(ends) if end is not None] or None,
    }


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """Both define linear and yarn in the same way; llama3's factors lie in a tensor and are refused with it."""
    theta = float(values.get("rope.freq_base", 10_000.0))
    factor = values.get("rope.scaling.factor")
    kind = values.get("rope.scaling.type", "none" if factor is None else "linear")
    if kind not in ROPE_TYPES:
        raise ValueError(
            f"unsupported rope.scaling.type {kind!r} in the GGUF file; supported: {', '.join(ROPE_TYPES)}"
        )
    if kind == "none" or factor is None or factor == 1.0:
        return {"rope_type": "default", "rope_theta": theta}
    trained = values.get("rope.scaling.original_context_length", values["context_length"])
    yarn = {"original_max_position_embeddings": int(trained)} if kind == "yarn" else {}
    return {"rope_type": kind, "rope_theta": theta, "factor": float(factor), **yarn}


def _check_tensors(header: GGUFHeader, config: Any) -> None:
    if "rope_freqs.weight" in header.tensors:
        raise ValueError(
            "unsupported tensor 'rope_freqs.weight' in the GGUF file: RoPE scaling of the type llama3; "
            "load the original checkpoint instead, whose config states it"
        )
    wanted = _shapes(config)
    if missing := sorted(wanted.keys() - header.tensors.keys()):
        raise ValueError(f"the GGUF file has no tensor {', '.join(missing[:5])}")
    if extra := sorted(header.tensors.keys() - wanted.keys()):
        raise ValueError(
            f"unsupported tensor {', '.join(extra[:5])} in the GGUF file: "
            f"{config.model_type} models of this decoder have none of this name"
        )
    for name, shape in header.tensors.items():
        if shape != wanted[name]:
            raise ValueError(
                f"tensor {name!r} of the GGUF file has shape {shape}; its sizes ask for {wanted[name]}"
            )


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """All tensors that a model of this config has, by GGUF name."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows = config.num_attention_heads * head_dim
    kv_rows = config.num_key_value_heads * head_dim
    embedding = (config.vocab_size, hidden)
    whole = {"token_embd.weight": embedding, "output_norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        whole["output.weight"] = embedding
    layer = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (q_rows, hidden),
        "attn_k.weight": (kv_rows, hidden),
        "attn_v.weight": (kv_rows, hidden),
        "attn_q.bias": (q_rows,),
        "attn_k.bias": (kv_rows,),
        "attn_v.bias": (kv_rows,),
        "attn_q_norm.weight": (head_dim,),
        "attn_k_norm.weight": (head_dim,),
        "attn_output.weight": (hidden, q_rows),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
    }
    family = config.model_type
    return whole | {
        f"blk.{i}.{name}": shape
        for i in range(config.num_hidden_layers)
        for name, shape in layer.items()
        if _ONLY_IN.get(name, family) == family
    }
