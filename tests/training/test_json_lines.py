"""Guards texts in JSON lines: escapes are read, and a line without text is named."""

from pathlib import Path

import pytest

from tokenrouter.workloads.json_lines import JsonLines


def source(folder: Path, content: str) -> JsonLines:
    (folder / "web").mkdir()
    (folder / "web" / "a.jsonl").write_text(content, encoding="utf-8")
    return JsonLines(name="web", data_dir=str(folder), folder="web")


def test_documents_are_the_texts(tmp_path: Path) -> None:
    """Raw JSON as text, or a line separator inside a text that cuts it in two."""
    lines = '{"text": "a\\n\\"b\\"", "url": "x"}\n\n{"text": "c\u2028d"}\n{"text": " "}\n'
    assert source(tmp_path, lines).documents() == ['a\n"b"', "c\u2028d"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of .*a.jsonl is no JSON"),
        ('{"txt": "a"}', "line 2 of .* no text in the field 'text'; it has: txt"),
        ("[1]", "no text in the field 'text'; it has: list"),
        ('{"text": 1}', "no text in the field 'text'"),
    ],
)
def test_a_line_without_text_is_named(tmp_path: Path, line: str, message: str) -> None:
    """Documents that silently go missing."""
    with pytest.raises(ValueError, match=message):
        source(tmp_path, f'{{"text": "a"}}\n{line}\n').documents()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """An empty list of documents where the path is wrong."""
    for data_dir, message in (
        (None, "TOKENROUTER_DATA_DIR"),
        (str(tmp_path), r"no file \*\.jsonl"),
    ):
        with pytest.raises(ValueError, match=message):
            JsonLines(name="web", data_dir=data_dir, folder="web").documents()
