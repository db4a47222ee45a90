"""GGUF files of tiny models, written by gguf in the way of llama.cpp's converter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

TYPE = gguf.GGMLQuantizationType
HEAD_DIM = 16


def tensors_of(hf_model: Any, arch: str) -> dict[str, np.ndarray]:
    """A transformers model's tensors under GGUF's names, in llama.cpp's order of rows."""
    config = hf_model.config
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    for key, value in hf_model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        rows = value.numpy()
        if arch == "llama" and ("q_proj" in key or "k_proj" in key):
            pairs = rows.reshape(-1, 2, HEAD_DIM // 2, rows.shape[1])
            rows = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))
        stem, _, suffix = key.rpartition(".")
        tensors[f"{names.get_name(stem)}.{suffix}"] = rows
    return tensors


def write(
    path: Path,
    hf_model: Any,
    arch: str,
    *,
    kind: Any = TYPE.F32,
    values: dict[str, Any] | None = None,
    change: Callable[[dict[str, np.ndarray]], object] = lambda _: None,
) -> Path:
    """A GGUF file of a tiny model; ``values`` are keys of the architecture, None leaves one out."""
    config, writer = hf_model.config, gguf.GGUFWriter(path, arch)
    keys = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    } | (values or {})
    for key, value in keys.items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }.get(type(value))
        if add is not None:
            add(f"{arch}.{key}", value)
    letters = sorted(ByteLevel.alphabet())
    merge = letters[70:72]
    letters.append("".join(merge))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*letters, "<s>", "</s>", "<eot>"])
    writer.add_token_types([1] * len(letters) + [3, 3, 3])
    writer.add_token_merges([" ".join(merge)])
    writer.add_bos_token_id(len(letters))
    writer.add_eos_token_id(len(letters) + 1)
    writer.add_eot_token_id(len(letters) + 2)
    tensors = tensors_of(hf_model, arch)
    change(tensors)
    for name, value in tensors.items():
        stored = TYPE.F32 if value.ndim == 1 else kind
        writer.add_tensor(name, gguf.quantize(value, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
