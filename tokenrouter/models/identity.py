"""The model hash: SHA-256 over what a model was loaded from.

Contents up to 2 GiB are hashed in full. Of larger ones 256 MiB are, in evenly spaced blocks that include the first and
the last of each file or tensor, beside all names and sizes: a change between the blocks is not seen.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FULL_BYTES = 2 << 30
SAMPLED_BYTES = 256 << 20
BLOCK_BYTES = 64 << 10
# Entries of a config that say how it was stored or loaded, not what the model computes.
_INCIDENTAL = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "architectures")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def checkpoint_files(folder: Path) -> list[Path]:
    """Config and weight files of a checkpoint's folder, in the order in which transformers looks for weights.

    Returns:
        ``config.json`` and the files that hold the weights; empty when the weights lie under other names.
    """
    for name in _WEIGHTS:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / "config.json", folder / name]
        if index.is_file():
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            return [folder / "config.json", *(folder / shard for shard in shards)]
    return []


def hash_files(files: Sequence[Path]) -> str:
    """Hash of files' contents, in the order given; neither names nor places count."""
    return _hash([(str(i), _mapped(file)) for i, file in enumerate(files)])


def hash_tensors(state: Mapping[str, Tensor], hf_config: Any) -> str:
    """Hash of a transformers config and of tensors as they are, so the same weights in another dtype differ."""
    parts = [("config", np.frombuffer(config_text(hf_config).encode(), np.uint8))]
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        label = f"{name} {tuple(value.shape)} {value.dtype}"
        parts.append((label, value.flatten().view(torch.uint8).numpy()))
    return _hash(parts)


def hash_recipe(hf_config: Any, *, seed: int) -> str:
    """Hash of what seeded random weights follow from, whatever dtype they are rounded to."""
    text = f"seed {seed} {config_text(hf_config)}"
    return _hash([("recipe", np.frombuffer(text.encode(), np.uint8))])


def config_text(hf_config: Any) -> str:
    """A transformers config's own values as JSON with sorted keys."""
    values = {k: v for k, v in hf_config.to_diff_dict().items() if k not in _INCIDENTAL}
    return json.dumps(values, sort_keys=True, default=str)


def _hash(parts: Sequence[tuple[str, Bytes]]) -> str:
    digest = hashlib.sha256()
    total = sum(data.size for _, data in parts)
    for label, data in parts:
        digest.update(f"{label}:{data.size};".encode())
        for block in [data] if total <= FULL_BYTES else _blocks(data, data.size / total):
            digest.update(block.data)
    return digest.hexdigest()[:16]


def _blocks(data: Bytes, share_frac: float) -> Iterator[Bytes]:
    num_blocks = max(2, int(share_frac * SAMPLED_BYTES / BLOCK_BYTES))
    if data.size <= num_blocks * BLOCK_BYTES:
        yield data
        return
    for i in range(num_blocks):
        start = i * (data.size - BLOCK_BYTES) // (num_blocks - 1)
        yield data[start : start + BLOCK_BYTES]


def _mapped(file: Path) -> Bytes:
    if not file.stat().st_size:
        return np.empty(0, np.uint8)
    return np.memmap(file, dtype=np.uint8, mode="r")
