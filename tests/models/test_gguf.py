"""Guards loading of GGUF files: the same logits as transformers, and no option that is passed over."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.gguf_files import TYPE, write
from tests.models.tools import logits
from tokenrouter.models import checkpoint, load_model
from tokenrouter.models.config import from_hf
from tokenrouter.models.gguf import hf_config
from tokenrouter.models.gguf_header import read_header
from tokenrouter.models.source import find_source
from tokenrouter.models.tiny import tiny_hf

NUM_TOKENS = 260  # in the tokenizer of the written files: transformers takes the size of the vocabulary from it
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e5,
    "factor": 8.0,
    "original_max_position_embeddings": 512,
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}, {}),
    "llama one key head": ("llama", {"num_key_value_heads": 1}, {}),
    "llama full heads": ("llama", {"num_key_value_heads": 4}, {}),
    "llama odd vocabulary": ("llama", {"vocab_size": 389}, {}),
    "llama linear": (
        "llama",
        {"rope_parameters": LINEAR},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "llama linear by the factor alone": (
        "llama",
        {"rope_parameters": LINEAR},
        {"rope.scaling.factor": 4.0},
    ),
    "qwen2": ("qwen2", {}, {"rope.freq_base": 1e4}),
    "qwen2 yarn": (
        "qwen2",
        {"rope_parameters": YARN},
        {
            "rope.freq_base": 5e5,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 512,
        },
    ),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}, {}),
    "qwen3 wide heads": ("qwen3", {"num_attention_heads": 6}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_the_model_that_was_written(tmp_path: Path, name: str) -> None:
    """Rows of q and k in llama.cpp's order; a default that is not llama.cpp's; RoPE scaling that is passed over."""
    family, options, values = CASES[name]
    hf_model = tiny_hf(family, **options)
    path = write(tmp_path / "m.gguf", hf_model, family, values=values)
    model = load_model(str(path), dtype="float32")
    assert model.config.eos_token_ids == {258, 259}, "end of sequence and end of turn"
    tied = options.get("tie_word_embeddings", False)
    assert (model.weights.lm_head_VE is model.weights.embed_VE) == tied
    ids = list(range(3, 250, 2))
    with torch.inference_mode():
        expected = hf_model(torch.tensor([ids])).logits[0]
    assert_close(logits(model, ids), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [TYPE.F16, TYPE.BF16, TYPE.Q8_0, TYPE.Q4_1], ids=lambda k: k.name)
def test_storage_types_give_the_logits_of_transformers(tmp_path: Path, kind: Any) -> None:
    """Our config beside transformers' own, which it reads from the file when it is given none."""
    hf_model = tiny_hf("llama", vocab_size=NUM_TOKENS)
    write(tmp_path / "m.gguf", hf_model, "llama", kind=kind, values={"rope.freq_base": 5e4})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    ids = list(range(3, 250, 2))
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    ours = load_model(str(tmp_path / "m.gguf"), dtype="float32")
    assert_close(logits(ours, ids), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "llama tied", "llama one key head", "qwen2"])
def test_config_equals_that_of_transformers(tmp_path: Path, name: str) -> None:
    """A size or an eps under another name. Not what transformers misses: RoPE scaling, and Qwen3's size of heads."""
    family, options, values = CASES[name]
    hf_model = tiny_hf(family, vocab_size=NUM_TOKENS, rms_norm_eps=2e-5, **options)
    path = write(tmp_path / "m.gguf", hf_model, family, values=values)
    assert_same_config(path, tied=options.get("tie_word_embeddings", False))


def test_config_of_the_default_model_equals_that_of_transformers(smollm2_gguf: Path) -> None:
    """Keys of a real converter: a RoPE base that is not the default, types and sizes of a real vocabulary."""
    assert_same_config(smollm2_gguf, tied=True)


def assert_same_config(path: Path, *, tied: bool) -> None:
    ours = hf_config(read_header(path))
    theirs = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    ends = frozenset[int]()
    assert from_hf(ours, eos_token_ids=ends) == from_hf(theirs, eos_token_ids=ends)
    assert ours.rope_parameters == theirs.rope_parameters
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings == tied


def rename(old: str, new: str) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


@pytest.mark.parametrize(
    ("values", "change", "message"),
    [
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, None, "'longrope'.*linear"),
        ({"rope.scaling.attn_factor": 0.5}, None, r"key llama\.rope\.scaling\.attn_factor = 0\.5"),
        ({"rope.dimension_count": 8}, None, r"rope\.dimension_count 8 .*head size, 16"),
        ({"attention.value_length": 8}, None, r"attention\.value_length 8"),
        ({"attention.sliding_window": 64}, None, r"attention\.sliding_window = 64"),
        ({"attention.head_count_kv": [2, 2, 1, 2]}, None, "head_count_kv = one value per layer"),
        ({"expert_count": 8}, None, "expert_count = 8; supported: 0"),
        ({"logit_scale": 2.0}, None, r"llama\.logit_scale"),
        ({"attention.head_count_kv": 3}, None, r"num_key_value_heads|attn_k\.weight"),
        ({"block_count": None}, None, r"no key llama\.block_count"),
        ({"attention.head_count_kv": None}, None, r"no key llama\.attention\.head_count_kv"),
        ({"block_count": 5}, None, r"no tensor blk\.4\.attn_k\.weight"),
        ({"block_count": 2**31}, None, "impossible sizes"),
        ({"feed_forward_length": 96}, None, r"ffn_(gate|up|down)\.weight.*\(160, 64\)|\(64, 160\)"),
        ({}, rename("output_norm.weight", "x.weight"), r"no tensor output_norm\.weight"),
        ({}, lambda t: t.update({"blk.0.attn_q.bias": np.ones(64, "f4")}), "attn_q.bias.*have none"),
        ({}, lambda t: t.update({"rope_freqs.weight": np.ones(8, "f4")}), "llama3.*original checkpoint"),
        ({}, lambda t: t.pop("token_embd.weight"), r"token_embd\.weight"),
    ],
)  # fmt: skip
def test_what_the_decoder_does_not_have_is_refused_before_the_weights(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, Any],
    change: Callable[[dict[str, np.ndarray]], object] | None,
    message: str,
) -> None:
    """Keys and tensors that change llama.cpp's arithmetic, and that transformers' reader passes over."""
    monkeypatch.setattr(checkpoint, "hf_model", lambda *_: pytest.fail("weights were read"))
    path = tmp_path / "m.gguf"
    write(path, tiny_hf("llama"), "llama", values=values, change=change or (lambda _: None))
    with pytest.raises(ValueError, match=f"(?s)m\\.gguf.*({message})"):
        load_model(str(path))


def test_another_architecture_is_named(tmp_path: Path) -> None:
    """A file of a family that shares tensor names with Llama but not its arithmetic."""
    path = tmp_path / "m.gguf"
    write(path, tiny_hf("llama"), "llama")
    data = path.read_bytes().replace(b"llama", b"gemma")
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"unsupported architecture: 'gemma'.*llama, qwen2, qwen3"):
        load_model(str(path))


def test_a_damaged_header_is_refused_or_read(tmp_path: Path) -> None:
    """A flipped bit in a length or an offset: endless loops, errors of numpy, reads past the end."""
    path, damaged = write(tmp_path / "m.gguf", tiny_hf("llama"), "llama"), tmp_path / "damaged.gguf"
    whole = path.read_bytes()
    head = whole.index(b"output_norm.weight") + 64
    generator = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        data = bytearray(whole)
        for at in generator.integers(0, head, 2):
            data[at] = generator.integers(256)
        damaged.write_bytes(data)
        try:
            hf_config(read_header(damaged))
        except ValueError:
            refused += 1
    assert refused > 50


def test_what_transformers_cannot_read_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that passes our check of the header and fails below: any error of numpy or gguf came through."""
    path = write(tmp_path / "m.gguf", tiny_hf("llama"), "llama")

    def fail(*_: object) -> None:
        raise NotImplementedError("IQ9")

    monkeypatch.setattr(gguf, "dequantize", fail)
    message = r"cannot load model.*unsupported GGUF file 'm\.gguf': NotImplementedError: IQ9"
    with pytest.raises(ValueError, match=message):
        load_model(str(path))


def test_a_cut_file_is_refused_at_every_length(tmp_path: Path) -> None:
    """An interrupted download that still opens: the last tensors would be read past the end."""
    path = write(tmp_path / "m.gguf", tiny_hf("llama"), "llama")
    whole, cut = path.read_bytes(), tmp_path / "cut.gguf"
    for length in [*range(0, 300, 7), *range(300, len(whole), len(whole) // 40), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cannot load model.*corrupt.*GGUF file 'cut\.gguf'"):
            load_model(str(cut))


def test_the_slow_reader_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gguf's reader, which takes seconds for a real vocabulary, ran once per config, tokenizer and model."""
    path = write(tmp_path / "m.gguf", tiny_hf("llama"), "llama")
    read: list[str] = []
    reader = gguf.GGUFReader

    def counted(place: str) -> Any:
        read.append(place)
        return reader(place)

    monkeypatch.setattr(gguf, "GGUFReader", counted)
    model = load_model(str(path))
    assert read == [str(path)]
    assert model.tokenizer.decode(model.tokenizer.encode("naïve café")) == "naïve café"


def test_the_tokenizer_is_the_one_that_transformers_chooses(
    smollm2_gguf: Path, smollm2_tokenizer: Any
) -> None:
    """The class is named, not looked up: another one would split text or place special tokens otherwise."""
    ours = checkpoint.tokenizer(find_source(str(smollm2_gguf), None))
    assert type(ours) is type(smollm2_tokenizer)
    assert ours.backend_tokenizer.to_str() == smollm2_tokenizer.backend_tokenizer.to_str()
    assert ours.special_tokens_map == smollm2_tokenizer.special_tokens_map
    assert ours.chat_template == smollm2_tokenizer.chat_template
