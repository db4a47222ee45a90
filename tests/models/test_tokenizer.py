"""Guards folders without a tokenizer, or with a broken one: refused for one family, made up for another."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.tools import save_model, save_tokenizer
from tokenrouter import LLM, SamplingParams
from tokenrouter.models import load_model
from tokenrouter.models.tiny import tiny_hf

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_without_tokenizer_files_takes_token_ids(tmp_path: Path, family: str) -> None:
    """Llama and Mistral asked for sentencepiece; Qwen2 and Qwen3 got a tokenizer of one token, silently."""
    tiny_hf(family).save_pretrained(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load_model(str(tmp_path), dtype="float32")
    [text] = [str(w.message) for w in caught if "tokenizer" in str(w.message)]
    assert all(
        word in text for word in (str(tmp_path), "tokenizer.json", "merges.txt", "text prompts")
    )
    assert model.tokenizer is None and model.config.eos_token_ids == {2}
    llm = LLM(model, router="all_high")
    (output,) = llm.generate([5, 6, 7], GREEDY)
    assert len(output.outputs[0].token_ids) == 3 and output.outputs[0].text == ""
    with pytest.raises(ValueError, match="no tokenizer: give token ids"):
        llm.generate("text", GREEDY)
    with pytest.raises(ValueError, match=r"router rule needs .*has no tokenizer: choose a router"):
        LLM(model, router="rule", executors="int8")


def _cut(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text()[:500])


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (_cut, r"\(tokenizer\.json, tokenizer_config\.json\) do not load: JSONDecodeError"),
    "of no content": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        r"\(tokenizer\.json, tokenizer_config\.json\) do not load: ",
    ),
    "settings alone": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        r"\(tokenizer_config\.json\) do not load: no vocabulary is there: tokenizer\.json",
    ),
    "half a vocabulary": (
        lambda folder: (folder / "tokenizer.json").rename(folder / "vocab.json"),
        r"\(tokenizer_config\.json, vocab\.json\) do not load: no vocabulary .*with merges\.txt",
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", SPOILT)
def test_tokenizer_files_that_do_not_load_are_an_error(
    tmp_path: Path, family: str, kind: str
) -> None:
    """Taken for a folder without a tokenizer; Qwen2 made one up around settings without a vocabulary."""
    tiny_hf(family).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    spoil, message = SPOILT[kind]
    spoil(tmp_path)
    with pytest.raises(ValueError, match=f"model '{tmp_path}': its tokenizer files {message}"):
        load_model(str(tmp_path))


def test_a_vocabulary_in_two_files_loads(tmp_path: Path) -> None:
    """Qwen2's older form, taken for a folder without a vocabulary."""
    save_model(tmp_path, "qwen2")
    tokenizer = load_model(str(tmp_path)).tokenizer
    (tmp_path / "tokenizer.json").unlink()
    tokenizer.backend_tokenizer.model.save(str(tmp_path))
    assert {"vocab.json", "merges.txt"} <= {path.name for path in tmp_path.iterdir()}
    assert load_model(str(tmp_path)).tokenizer.encode("ab") == tokenizer.encode("ab")
