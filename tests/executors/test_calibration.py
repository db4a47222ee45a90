"""Guards calibration: maxima of what the linears really get, on the right text, kept on disk and read back whole.

T tokens of a sequence, E hidden size.
"""

import logging
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tokenrouter.executors import calibration
from tokenrouter.executors.activations import InputMaxima, input_maxima
from tokenrouter.executors.calibration import Calibration
from tokenrouter.models import LoadedModel, tiny_random
from tokenrouter.models.loader import from_hf_model
from tokenrouter.models.tiny import ByteTokenizer, tiny_hf
from tokenrouter.workloads import LocalText, PythonDocs, calibration_documents

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
}


def sequences(num: int = 3, length: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 250, (num, length), generator=generator).tolist()


def hooked_maxima(hf_model: Any, ids: list[list[int]]) -> list[InputMaxima]:
    """The same as transformers gives it, a sequence at a time."""
    seen: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Any:
        def keep(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            now_K = inputs[0][0].abs().amax(0)
            seen[name] = torch.maximum(seen.get(name, now_K), now_K)

        return keep

    wanted = ("q_proj", "gate_proj", "down_proj")
    for name, module in hf_model.named_modules():
        if name.endswith(wanted):
            module.register_forward_pre_hook(hook(name))
    with torch.inference_mode():
        for one in ids:
            hf_model(torch.tensor([one]))
    prefixes = [f"model.layers.{layer}" for layer in range(hf_model.config.num_hidden_layers)]
    return [
        InputMaxima(
            qkv_E=seen[f"{prefix}.self_attn.q_proj"],
            gate_up_E=seen[f"{prefix}.mlp.gate_proj"],
            down_I=seen[f"{prefix}.mlp.down_proj"],
        )
        for prefix in prefixes
    ]


def assert_same(ours: list[InputMaxima], theirs: list[InputMaxima], **tolerance: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        for field in fields(InputMaxima):
            assert_close(getattr(one, field.name), getattr(other, field.name), **tolerance)


@pytest.mark.parametrize("which", FAMILIES)
def test_maxima_are_those_of_transformers(which: str) -> None:
    """Inputs of another linear or layer, head norms or biases left out, a sequence that sees another, positions."""
    family, options = FAMILIES[which]
    hf_model = tiny_hf(family, **options)
    model = from_hf_model(hf_model, ByteTokenizer(), name="tiny")
    ours = input_maxima(model, sequences())
    assert_same(ours, hooked_maxima(hf_model, sequences()), rtol=1e-4, atol=1e-5)


def test_a_rounded_model_is_run_in_float32() -> None:
    """Statistics in bfloat16, with an error that grows from layer to layer; a model that was converted in place."""
    model = tiny_random("qwen3", dtype="bfloat16")
    before = model.weights.layers[0].qkv_OE.clone()
    assert_same(
        input_maxima(model, sequences()),
        input_maxima(model.astype("float32"), sequences()),
        rtol=1e-6,
        atol=1e-6,
    )
    assert model.weights.layers[0].qkv_OE.dtype == torch.bfloat16
    assert torch.equal(model.weights.layers[0].qkv_OE, before)


@pytest.fixture
def model() -> LoadedModel:
    return tiny_random("llama", num_hidden_layers=2)


def never(*_: Any) -> list[InputMaxima]:
    raise AssertionError("measured again")


def test_a_second_run_reads_what_the_first_measured(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that is written and never read, or gives back something else; half a file left behind."""
    asked = Calibration(num_tokens=64, cache_dir=str(tmp_path / "new" / "folder"))
    first = asked.statistics(model)
    monkeypatch.setattr(calibration, "input_maxima", never)
    second = asked.statistics(tiny_random("llama", num_hidden_layers=2))
    assert second.key == first.key
    assert_same(second.maxima, first.maxima, rtol=0, atol=0)
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == [f"{first.key}.npz"]


def test_everything_that_changes_the_maxima_changes_the_key(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statistics of another model, text, dtype or length taken for these."""
    (tmp_path / "text").mkdir()
    for number in range(2):
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number} " * 60)
    text = LocalText(name="text", data_dir=str(tmp_path), folder="text")
    asked = Calibration(num_tokens=64, cache_dir=str(tmp_path / "cache"))
    keys = [
        asked.statistics(model).key,
        asked.statistics(model.astype("bfloat16")).key,
        asked.statistics(tiny_random("llama", num_hidden_layers=2, seed=1)).key,
        asked.statistics(tiny_random("qwen2", num_hidden_layers=2)).key,
        replace(asked, num_tokens=128).statistics(model).key,
        replace(asked, text=text).statistics(model).key,
    ]
    monkeypatch.setattr(calibration, "VERSION", calibration.VERSION + 1)
    keys.append(asked.statistics(model).key)
    assert len(set(keys)) == len(keys)


def test_a_damaged_file_is_measured_again(
    model: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that ends with a traceback, or goes on with wrong scales, after a power cut or a bad disk."""
    asked = Calibration(num_tokens=64, cache_dir=str(tmp_path))
    right = asked.statistics(model)
    path = tmp_path / f"{right.key}.npz"
    whole = path.read_bytes()
    middle = len(whole) // 3  # within the first array
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    short = {f.name: np.ones((1, 4), np.float32) for f in fields(InputMaxima)}
    np.savez(tmp_path / "short.npz", **short)  # type: ignore[arg-type]
    np.savez(tmp_path / "other.npz", qkv_E=np.ones((2, 4), np.float32))
    others = [(tmp_path / f"{name}.npz").read_bytes() for name in ("short", "other")]
    for damaged in (b"", b"text", whole[: len(whole) // 2], whole[:-1], flipped, *others):
        caplog.clear()
        path.write_bytes(damaged)
        assert_same(asked.statistics(model).maxima, right.maxima, rtol=0, atol=0)
        assert "is damaged" in caplog.text
        assert len(path.read_bytes()) == len(whole)


def test_a_folder_that_cannot_be_written_to_is_a_warning(
    model: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A read-only home folder must not end the run."""
    (tmp_path / "file").write_text("")
    asked = Calibration(num_tokens=64, cache_dir=str(tmp_path / "file" / "below"))
    assert len(asked.statistics(model).maxima) == 2
    assert "cannot be kept" in caplog.text and "cache_dir" in caplog.text


def test_the_default_folder_is_the_users_cache(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files in the working directory of whoever starts a run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = Calibration(num_tokens=64).statistics(model).key
    assert (tmp_path / "tokenrouter" / "calibration" / f"{key}.npz").is_file()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Calibration(num_tokens=64).statistics(model)
    assert os.listdir(tmp_path / "home" / ".cache" / "tokenrouter" / "calibration")


def test_only_the_calibration_side_is_read(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales fitted to the very text that quality is measured on."""
    given: list[list[int]] = []

    def record(_: LoadedModel, ids: list[list[int]]) -> list[InputMaxima]:
        given.extend(ids)
        return input_maxima(model, ids)

    monkeypatch.setattr(calibration, "input_maxima", record)
    Calibration(num_tokens=1500, cache_dir=str(tmp_path)).statistics(model)
    assert [len(ids) for ids in given] == [512, 512, 512]
    own = "\n\n".join(calibration_documents(PythonDocs().documents()))
    for ids in given:
        assert ByteTokenizer().decode(ids).strip("�") in own


def test_sequences_fit_the_model(tmp_path: Path) -> None:
    """Positions beyond the RoPE tables of a model with a short context."""
    short = tiny_random("llama", num_hidden_layers=1, max_position_embeddings=100)
    assert Calibration(num_tokens=250, cache_dir=str(tmp_path)).statistics(short).maxima


def test_what_cannot_be_calibrated_says_why(model: LoadedModel, tmp_path: Path) -> None:
    """A traceback from the tokenizer, or scales from NaN."""
    asked = Calibration(num_tokens=64, cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"'tiny_llama' has no tokenizer: .*executor=int8"):
        asked.statistics(replace(model, tokenizer=None))
    with pytest.raises(ValueError, match=r"needs 10000384 tokens .*num_tokens.* has \d+: lower"):
        replace(asked, num_tokens=10_000_000).statistics(model)
    with pytest.raises(ValueError, match=r"the input of qkv in layer 2 is not finite: .*NaN"):
        asked.statistics(tiny_with_nan())
    assert not list(tmp_path.iterdir()), "nothing of a failed calibration is kept"


def tiny_with_nan() -> LoadedModel:
    model = tiny_random("llama", num_hidden_layers=3)
    model.weights.layers[1].down_EI[3, 5] = float("nan")
    return model


@pytest.mark.parametrize("num_tokens", [0, -1, 1.5, "2048", None, True])
def test_num_tokens_is_checked_before_a_model_is_loaded(num_tokens: Any) -> None:
    """A fraction of a token; a string from the command line that fails as a TypeError after the model is loaded."""
    with pytest.raises(ValueError, match=r"num_tokens=.* must be an integer of at least 1"):
        Calibration(num_tokens=num_tokens)


def test_a_texts_name_is_no_text() -> None:
    """``calibration.text=wikitext2`` on the command line: an AttributeError after the model is loaded."""
    with pytest.raises(
        ValueError, match=r"text='wikitext2' must be a text as in conf/data.*\$\{data\}"
    ):
        Calibration(text="wikitext2")  # type: ignore[arg-type]


def test_calibrating_is_announced(
    model: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Seconds of silence on a large model."""
    caplog.set_level(logging.INFO, "tokenrouter")
    Calibration(num_tokens=64, cache_dir=str(tmp_path)).statistics(model)
    assert "calibrating on 64 tokens of python_docs" in caplog.text
