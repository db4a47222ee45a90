"""Guards against overlapping or short windows, thresholds set on the text that is evaluated, and missing data that
fails unclearly.
"""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenrouter.workloads import (
    LocalText,
    PythonDocs,
    calibration_documents,
    evaluation_documents,
    text_hash,
    windows,
)


@given(length=st.integers(1, 50), count=st.integers(1, 8), spare=st.integers(0, 300))
def test_windows_have_their_length_and_never_overlap(length: int, count: int, spare: int) -> None:
    result = windows(range(length * count + spare), length, count)
    assert [len(window) for window in result] == [length] * count
    assert all(earlier[-1] < later[0] for earlier, later in pairwise(result))


def test_windows_spread_over_the_text() -> None:
    assert [window[0] for window in windows(range(1000), 10, 4)] == [0, 250, 500, 750]


def test_too_little_text_says_how_much_is_needed() -> None:
    with pytest.raises(ValueError, match="2 windows of 10 tokens need 20 tokens; the text has 19"):
        windows(range(19), 10, 2)


@pytest.mark.parametrize(("length", "count"), [(0, 1), (1, 0)])
def test_no_windows_are_refused(length: int, count: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        windows(range(9), length, count)


def test_the_default_text_is_long_and_the_same_twice() -> None:
    documents = PythonDocs().documents()
    assert sum(map(len, documents)) > 300_000
    assert text_hash(documents) == text_hash(PythonDocs().documents())


def test_text_hash_sees_document_borders() -> None:
    assert text_hash(["ab", "c"]) != text_hash(["a", "bc"])


def _local(data_dir: str | None) -> LocalText:
    return LocalText(name="wikitext2", data_dir=data_dir, folder="wikitext2", pattern="valid.txt")


def test_unset_data_dir_says_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"wikitext2.*TOKENROUTER_DATA_DIR.*paths\.data_dir"):
        _local(None).documents()


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"no folder {tmp_path}/wikitext2; set TOKENROUTER_DATA_DIR"
    ):
        _local(str(tmp_path)).documents()


def test_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "wikitext2").mkdir()
    with pytest.raises(ValueError, match=r"no file valid\.txt"):
        _local(str(tmp_path)).documents()


def test_local_text_reads_its_file(tmp_path: Path) -> None:
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "valid.txt").write_text("héllo\n", encoding="utf-8")
    assert _local(str(tmp_path)).documents() == ["héllo\n"]


def test_a_file_is_cut_where_its_documents_start(tmp_path: Path) -> None:
    (tmp_path / "wikitext2").mkdir()
    text = " \n = One = \n a \n = = Part = = \n b \n = Two = \n c \n"
    (tmp_path / "wikitext2" / "valid.txt").write_text(text, encoding="utf-8")
    source = LocalText(
        name="wikitext2",
        data_dir=str(tmp_path),
        folder="wikitext2",
        document_start="^ = [^=].* = $",
    )
    assert source.documents() == [" = One = \n a \n = = Part = = \n b \n", " = Two = \n c \n"]


@given(st.lists(st.text("abc", min_size=1, max_size=3), min_size=2, max_size=20, unique=True))
def test_every_document_is_on_exactly_one_side(documents: list[str]) -> None:
    calibration, evaluation = calibration_documents(documents), evaluation_documents(documents)
    assert not set(calibration) & set(evaluation)
    assert sorted([*calibration, *evaluation]) == sorted(documents)


def test_no_paragraph_of_the_default_text_is_on_both_sides() -> None:
    """Thresholds were set on a quarter of the documents that the windows were cut from; some of
    them also quote others, or are there twice.
    """
    documents = PythonDocs().documents()
    sides = calibration_documents(documents), evaluation_documents(documents)
    calibration, evaluation = (
        {p.strip() for text in side for p in text.split("\n\n") if p.strip()} for side in sides
    )
    assert not calibration & evaluation
    assert all(sum(map(len, side)) > 80_000 for side in sides)


def test_a_paragraph_that_is_evaluated_is_not_calibrated_on() -> None:
    documents = ["own\n\nshared", "shared\n \nother"]
    assert calibration_documents(documents) == ["own"]
    assert evaluation_documents(documents) == documents[1:]


def test_one_document_has_no_two_sides() -> None:
    for side in (calibration_documents, evaluation_documents):
        with pytest.raises(ValueError, match=r"this text has 1: .*data\.document_start"):
            side(["all in one"])


def test_a_text_of_repeats_leaves_nothing_to_calibrate_on() -> None:
    with pytest.raises(ValueError, match="no text is left to calibrate on"):
        calibration_documents(["same", "same"])
