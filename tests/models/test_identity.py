"""Guards the model hash: equal for what is the same model, different for every other one."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models.tools import save_tokenizer
from tokenrouter.models import identity, load_model, tiny_random
from tokenrouter.models.loader import from_hf_model
from tokenrouter.models.tiny import ByteTokenizer, tiny_hf
from tokenrouter.telemetry import collect_provenance


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_hf().save_pretrained(tmp_path / "a")
    return tmp_path / "a"


def file_hash(folder: Path) -> str:
    return identity.hash_files(identity.checkpoint_files(folder))


def test_one_changed_value_changes_the_hash() -> None:
    """A sum and the first 64 values: swapped values, or a change that cancels out, went unseen."""
    hf_model = tiny_hf()
    before = identity.hash_tensors(hf_model.state_dict(), hf_model.config)
    weight = hf_model.model.layers[2].mlp.down_proj.weight
    with torch.no_grad():
        weight[-2:, -1] = weight[-2:, -1].flip(0).clone()
    assert identity.hash_tensors(hf_model.state_dict(), hf_model.config) != before


def test_the_config_counts() -> None:
    """The same tensors under another RoPE base or eps are another model."""
    hf_model = tiny_hf()
    before = identity.hash_tensors(hf_model.state_dict(), hf_model.config)
    hf_model.config.rms_norm_eps = 1e-3
    assert identity.hash_tensors(hf_model.state_dict(), hf_model.config) != before


def test_load_dtype_and_place_do_not_count(folder: Path) -> None:
    """The reference in float32 and the run in bfloat16 of one checkpoint looked like two models."""
    save_tokenizer(folder)
    moved = shutil.copytree(folder, folder.parent / "b")
    hashes = {load_model(str(folder), dtype=d).model_hash for d in ("float32", "bfloat16")}
    assert hashes == {load_model(str(moved)).model_hash, file_hash(folder)}
    shorter = load_model(str(folder), max_model_len=100)
    assert hashes == {shorter.model_hash, shorter.astype("float32").model_hash}


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_files_are_hashed_by_content(folder: Path, file: str) -> None:
    """A byte in the middle; a config that was edited by hand."""
    before = file_hash(folder)
    data = bytearray((folder / file).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / file).write_bytes(data)
    assert file_hash(folder) != before


def test_shards_are_all_hashed(tmp_path: Path) -> None:
    """Only the first shard, or the index alone."""
    tiny_hf().save_pretrained(tmp_path, max_shard_size="100KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    files = identity.checkpoint_files(tmp_path)
    assert len(shards) > 2 and [file.name for file in files] == ["config.json", *shards]


def test_random_models_are_their_recipe() -> None:
    """Rounding is no other model; seed, family and options are."""
    first = tiny_random("llama").model_hash
    assert tiny_random("llama", dtype="bfloat16").model_hash == first
    others = [tiny_random("llama", seed=1), tiny_random("qwen2"), tiny_random(rms_norm_eps=1e-2)]
    assert len({first, *(model.model_hash for model in others)}) == 4


def test_large_contents_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes of hashing for a large checkpoint; ends and sizes that sampling leaves out."""
    monkeypatch.setattr(identity, "FULL_BYTES", 1 << 20)
    monkeypatch.setattr(identity, "SAMPLED_BYTES", 256 << 10)
    data = np.zeros(3 << 20, np.uint8)
    seen = {hash_of(tmp_path, data), hash_of(tmp_path, data[:-1])}
    for at in (0, len(data) - 1):
        changed = data.copy()
        changed[at] = 1
        seen.add(hash_of(tmp_path, changed))
    assert len(seen) == 4
    changed = data.copy()
    changed[500_000] = 1
    assert hash_of(tmp_path, changed) in seen, "a block that is not sampled was read"


def hash_of(folder: Path, data: np.ndarray) -> str:
    data.tofile(folder / "x.bin")
    return identity.hash_files([folder / "x.bin"])


def test_a_model_in_memory_has_a_hash_that_reaches_the_provenance() -> None:
    """An empty hash in provenance.json."""
    model = from_hf_model(tiny_hf(), ByteTokenizer(), name="memory")
    assert len(model.model_hash) == 16 and int(model.model_hash, 16)
    found = collect_provenance(seed=0, model=model.name, model_hash=model.model_hash)
    assert found.as_dict()["model_hash"] == model.model_hash
