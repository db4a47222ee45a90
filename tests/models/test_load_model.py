"""Guards loading from folders and files: what is loaded is the checkpoint, what is broken is refused clearly."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tokenrouter import LLM, SamplingParams
from tokenrouter.models import SUPPORTED, load_model
from tokenrouter.models.loader import from_hf_model
from tokenrouter.models.tiny import ByteTokenizer, tiny_hf, tiny_random

ALL_SUPPORTED = ".*".join(SUPPORTED)


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 256 bytes and two special tokens."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)


def save_model(folder: Path, family: str = "llama", **options: Any) -> Any:
    """A tiny checkpoint as users have them; returns the transformers model."""
    hf_model = tiny_hf(family, **options)
    hf_model.save_pretrained(folder)
    save_tokenizer(folder)
    return hf_model


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_model(folder)
    return folder


def logits(llm: LLM, ids: list[int]) -> torch.Tensor:
    parts: list[torch.Tensor] = []
    llm.score([ids], sink=lambda _, __, logits_TV: parts.append(logits_TV.clone()))
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_a_local_folder(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    """A tensor name of a family that is missed on the way through a file; a tied head left random."""
    hf_model = save_model(tmp_path, family, **options)
    model = load_model(str(tmp_path), dtype="float32")
    assert (model.config.family, model.dtype) == (family, torch.float32)
    ids = list(range(3, 40))
    with torch.inference_mode():
        expected = hf_model(torch.tensor([ids])).logits[0]
    llm = LLM(model)
    assert_close(logits(llm, ids), expected, rtol=0, atol=1e-4)
    (output,) = llm.generate("ab", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3 and output.prompt_token_ids == tuple(
        model.tokenizer.encode("ab")
    )


def test_dtype_and_limit(llama_folder: Path) -> None:
    """Weights left in the file's dtype; a limit that is ignored or longer than the model's own."""
    model = load_model(str(llama_folder), max_model_len=128)
    assert model.dtype == torch.bfloat16 and model.config.max_model_len == 128
    assert model.weights.embed_VE.dtype == model.weights.layers[0].down_EI.dtype == torch.bfloat16
    assert model.weights.cos_ND.shape[0] == 128
    for limit in (0, 4097):
        with pytest.raises(ValueError, match=rf"max_model_len {limit} must lie in 1 \.\. 4096"):
            load_model(str(llama_folder), max_model_len=limit)
    with pytest.raises(ValueError, match="unsupported dtype 'int8'; supported: bfloat16"):
        load_model(str(llama_folder), dtype="int8")


def test_hash_follows_the_weights(llama_folder: Path) -> None:
    """A cache or a report keyed by the hash mixes up two models, or sees two where there is one."""
    first = load_model(str(llama_folder), dtype="float32").model_hash
    assert load_model(str(llama_folder), dtype="float32").model_hash == first
    assert tiny_random("llama", seed=1).model_hash != tiny_random("llama", seed=0).model_hash


def test_end_of_sequence_ids_are_collected() -> None:
    """Chat models have several; those of the generation config are forgotten most often."""
    hf_model = tiny_hf("llama")
    hf_model.generation_config.eos_token_id = [7, 9]
    model = from_hf_model(hf_model, ByteTokenizer(), name="x")
    assert model.config.eos_token_ids == {7, 9, ByteTokenizer.eos_token_id}


def test_unsupported_architecture_is_named_with_the_supported_ones(tmp_path: Path) -> None:
    """A traceback from the depths, or a model that is loaded and computes nonsense."""
    GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=300, bos_token_id=1, eos_token_id=2)
    ).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=f"GPT2LMHeadModel.*supported.*{ALL_SUPPORTED}"):
        load_model(str(tmp_path))


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def drop_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 2.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0] * 8,
    "original_max_position_embeddings": 1024,
}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda f: change_config(f, model_type="new", architectures=["NewLM"]),
            f"new.*{ALL_SUPPORTED}",
        ),
        (lambda f: change_config(f, hidden_act="gelu"), "hidden_act 'gelu'; supported: silu"),
        (lambda f: change_config(f, rope_parameters=LONGROPE), "'longrope'; supported: default"),
        (lambda f: (f / "config.json").write_text("{"), "not a valid JSON"),
        (lambda f: (f / "model.safetensors").unlink(), "no file named model.safetensors"),
        (cut_weights, "unreadable"),
        (drop_tensor, r"no tensor model\.layers\.1\.mlp\.down_proj\.weight"),
    ],
    ids=["unknown type", "activation", "rope", "config", "no weights", "cut weights", "no tensor"],
)
def test_a_spoilt_folder_is_refused(
    llama_folder: Path, tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    """Errors of every kind from the libraries underneath; random numbers for a tensor that is missing."""
    folder = tmp_path / "model"
    shutil.copytree(llama_folder, folder)
    spoil(folder)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./no/such/folder", "no such model folder"),
        ("~/no/such/folder", "no such model folder"),
        ("/no/such/file.gguf", "no such GGUF file"),
        ("package:nope", "no GGUF file in package 'nope'.*pip install"),
        ("package:nope.nope", "no GGUF file in package 'nope.nope'"),
        ("package:", "no GGUF file in package ''"),
        ("package:torch", "no GGUF file in package 'torch'"),
    ],
)
def test_an_unknown_name_is_refused(name: str, message: str) -> None:
    """An import error, or a look on the hub, for what cannot be there."""
    with pytest.raises(ValueError, match=message):
        load_model(name)


def test_an_unknown_hub_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An OSError of the hub's client (offline here: no test asks the network)."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="cannot load model 'nobody/none'"):
        load_model("nobody/none")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    """A clone without its large files."""
    with pytest.raises(ValueError, match=f"cannot load model '{tmp_path}'"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model " * 1000])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    """A download page saved under the model's name."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"GGUF file 'model\.gguf'"):
        load_model(str(path))
    with pytest.raises(ValueError, match=r"GGUF file 'model\.gguf'"):
        load_model(str(tmp_path), gguf_file="model.gguf")


@pytest.mark.parametrize("num_bytes", [100, 3_000_000])
def test_a_truncated_gguf_is_refused(tmp_path: Path, smollm2_gguf: Path, num_bytes: int) -> None:
    """An interrupted download: the header is whole, tensors are not."""
    path = tmp_path / "model.gguf"
    with smollm2_gguf.open("rb") as source:
        path.write_bytes(source.read(num_bytes))
    with pytest.raises(ValueError, match=r"corrupt.*GGUF file 'model\.gguf'"):
        load_model(str(path))


def test_tiny_random_refuses_another_family() -> None:
    """A typo gives a model of another family."""
    with pytest.raises(ValueError, match="family 'gpt2'; families: llama, mistral, qwen2, qwen3"):
        tiny_random("gpt2")
