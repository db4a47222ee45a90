"""Guards against overlapping or short windows, and missing data that fails unclearly."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenrouter.workloads import LocalText, PythonDocs, text_hash, windows


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
