"""Guards the text that is learned from: not measured elsewhere, not in both splits, the same in a longer run."""

import pytest
import torch

from tests.training.conftest import Documents
from tokenrouter.training.windows import Cut, cut_windows, texts_by_name
from tokenrouter.workloads import calibration_documents, evaluation_documents


def encode(text: str) -> list[int]:
    return list(text.encode())


def cut(documents: Documents, **options: int) -> Cut:
    sizes = {"window_tokens": 64, "num_tokens": 512, "seed": 0, **options}
    return cut_windows(documents, encode, **sizes)  # type: ignore[arg-type]


def test_windows_have_their_length_and_splits(documents: Documents) -> None:
    """Windows that are short, twice there, or all of one split."""
    found = cut(documents)
    assert [len(w.ids_N) for w in found.windows] == [64] * 8 and found.num_missing == 0
    assert [w.split for w in found.windows] == ["train"] * 7 + ["valid"]
    assert len({w.name for w in found.windows}) == len({w.seed for w in found.windows}) == 8


def test_no_document_is_in_both_splits_or_evaluated(documents: Documents) -> None:
    """Validation on what was learned, or learning from what quality is measured on."""
    windows = cut(documents, num_tokens=100_000).windows
    kept = calibration_documents(documents.texts)
    by_split = {
        split: {int(d) for w in windows if w.split == split for d in w.document_N}
        for split in ("train", "valid")
    }
    assert by_split["valid"] == {0, 8} and not by_split["train"] & by_split["valid"]
    evaluated = set(evaluation_documents(documents.texts))
    for window in windows:
        for document in window.document_N.unique().tolist():
            own = bytes(window.ids_N[window.document_N == document].tolist()).decode()
            assert own in kept[document] + "\n\n" and kept[document] not in evaluated


def test_more_tokens_keep_the_windows(documents: Documents) -> None:
    """A longer run that makes everything again, or that changes what is there."""
    few, many = ({w.name: w for w in cut(documents, num_tokens=n).windows} for n in (512, 1024))
    assert len(many) == 16 and set(few) < set(many)
    for name, window in few.items():
        assert torch.equal(window.ids_N, many[name].ids_N)
        assert (window.seed, window.prompt_len) == (many[name].seed, many[name].prompt_len)


def test_another_seed_chooses_other_windows(documents: Documents) -> None:
    names = [{w.name for w in cut(documents, seed=seed).windows} for seed in (0, 1)]
    assert names[0] != names[1]


def test_both_phases_are_there(documents: Documents) -> None:
    """A decode head without a token to learn from, or prompts that never fill a window."""
    lengths = [w.prompt_len for w in cut(documents, num_tokens=100_000).windows]
    assert min(lengths) >= 1 and max(lengths) == 64
    assert 0.2 < sum(n == 64 for n in lengths) / len(lengths) < 0.8


def test_too_few_tokens_are_counted(documents: Documents) -> None:
    """A data set that is silently smaller than asked for."""
    found = cut(documents, num_tokens=1_000_000)
    assert found.num_missing == 1_000_000 // 64 - len(found.windows) > 0


def test_a_split_shorter_than_a_window_is_one() -> None:
    """A text of a few files, whose validation side is a little too short, that is refused as a whole."""
    texts = tuple("x" * 40 if i % 32 == 0 else f"{i}" * 60 for i in range(40))
    found = cut(Documents(texts=texts), window_tokens=100)
    [valid] = [w for w in found.windows if w.split == "valid"]
    assert len(valid.ids_N) == 2 * 42 and 1 <= valid.prompt_len <= 84
    assert {len(w.ids_N) for w in found.windows if w.split == "train"} == {100}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("a\n" * 90, "b", "c"), "its calibration side has 1: choose a text of at least 8"),
        (tuple("abcdefgh"), "train side of what is learned from has 3 tokens, and a window has 64"),
    ],
)
def test_texts_that_are_too_short(texts: tuple[str, ...], message: str) -> None:
    """A split without a window, found out after an hour of labels."""
    with pytest.raises(ValueError, match=message):
        cut(Documents(texts=texts))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "must name at least one text"),
        (["a", "a"], "each once; texts: a, b"),
        (["c"], r"no text 'c'; texts: a, b.*\+data@collect\.texts\.c="),
    ],
)
def test_sources_that_are_not_there(names: list[str], message: str) -> None:
    """A misspelt name that leaves a text out."""
    with pytest.raises(ValueError, match=message):
        texts_by_name({"a": Documents(name="a"), "b": Documents(name="b")}, names)


def test_sources_in_the_order_asked_for() -> None:
    texts = {"a": Documents(name="a"), "b": Documents(name="b")}
    assert texts_by_name(texts, ["b", "a"]) == [texts["b"], texts["a"]]
