"""Guards loading from folders and files: what is loaded is the checkpoint, what is broken is refused clearly."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers.utils import logging as hf_logging

from tests.models.gguf_files import write
from tests.models.tools import logits, save_model
from tokenrouter import LLM, SamplingParams
from tokenrouter.models import load_model
from tokenrouter.models.loader import from_hf_model
from tokenrouter.models.tiny import ByteTokenizer, tiny_hf


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_model(folder)
    return folder


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
    assert_close(logits(model, ids), expected, rtol=0, atol=1e-4)
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


def test_end_of_sequence_ids_are_collected() -> None:
    """Chat models have several; those of the generation config are forgotten most often."""
    hf_model = tiny_hf("llama")
    hf_model.generation_config.eos_token_id = [7, 9]
    model = from_hf_model(hf_model, ByteTokenizer(), name="x")
    assert model.config.eos_token_ids == {7, 9, ByteTokenizer.eos_token_id}


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


@pytest.mark.parametrize("num_bytes", [100, 3_000_000, 98_000_000, -1])
def test_a_truncated_gguf_is_refused(tmp_path: Path, smollm2_gguf: Path, num_bytes: int) -> None:
    """An interrupted download: cut within the header, within the tensors, or one byte short."""
    path = tmp_path / "model.gguf"
    with smollm2_gguf.open("rb") as source:
        path.write_bytes(source.read(num_bytes % smollm2_gguf.stat().st_size))
    with pytest.raises(ValueError, match=r"corrupt.*GGUF file 'model\.gguf'"):
        load_model(str(path))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("screen", [Terminal, io.StringIO])
def test_one_bar_on_a_terminal_and_one_line_elsewhere(
    llama_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    screen: type[io.StringIO],
) -> None:
    """Seconds of silence; two bars for one load; half lines in a log file; bars that stay off for later users."""
    path = llama_folder if kind == "folder" else write(tmp_path / "m.gguf", tiny_hf(), "llama")
    caplog.set_level("INFO", logger="tokenrouter")
    hf_logging.enable_progress_bar()  # a job of this process may have switched it off
    monkeypatch.setattr(sys, "stderr", screen())
    load_model(str(path))
    shown = sys.stderr.getvalue()
    bars = {part.split(":")[0].strip() for part in shown.split("\r") if "%|" in part}
    assert len(bars) == (screen is Terminal), shown
    assert [r.getMessage() for r in caplog.records] == [f"loading model {path} in bfloat16"]
    assert hf_logging.is_progress_bar_enabled()
