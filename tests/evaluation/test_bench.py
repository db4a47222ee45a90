"""Guards what benchmark scripts share: a last line that is no JSON, a file that says something else, late refusals."""

import json
from pathlib import Path

import pytest

from tokenrouter.evaluation.bench import (
    MODEL,
    add_data_dir,
    add_json,
    check_json,
    check_least,
    parser_for,
    provenance_of,
    put_out,
)
from tokenrouter.models import LoadedModel

FOUND = {"a": 1.25, "rows": [{"b": None}, {"c": [1, 2]}], "text": "two\nlines"}


def test_the_last_line_and_the_file_are_the_same_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line break in the middle, or a value that JSON has no word for."""
    path = tmp_path / "out.json"
    put_out(FOUND | {"path": Path("x")}, path)
    shown = capsys.readouterr().out
    assert shown.count("\n") == 1 and len(path.read_text().splitlines()) > 5
    assert json.loads(shown) == json.loads(path.read_text()) == FOUND | {"path": "x"}


def test_a_script_chooses_its_files_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounded numbers in the file alone."""
    path = tmp_path / "out.json"
    put_out(FOUND, path, as_json=lambda found: f'{{"a":\n{found["a"]:.1f}}}')
    assert path.read_text() == '{"a":\n1.2}\n'
    assert capsys.readouterr().out == '{"a": 1.2}\n'


def test_the_data_folder_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that stays None, or one that the environment wins against."""
    monkeypatch.setenv("TOKENROUTER_DATA_DIR", "sets")
    parser = parser_for("what it does")
    add_data_dir(parser)
    assert parser.parse_args([]).data_dir == "sets"
    chosen = parser.parse_args(["--quick", "--data-dir", "others"])
    assert (chosen.data_dir, chosen.quick) == ("others", True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--json", "no/such/x.json"], "--json no/such/x.json: there is no folder no/such"),
        (["--some-count", "0"], "--some-count must be at least 1, got 0"),
    ],
)
def test_what_would_fail_at_the_end_is_refused_at_the_start(
    capsys: pytest.CaptureFixture[str], given: list[str], says: str
) -> None:
    parser = parser_for("")
    add_json(parser)
    parser.add_argument("--some-count", type=int)

    def check(*arguments: str) -> None:
        args = parser.parse_args(arguments)
        check_json(parser, args)
        check_least(parser, args, 1, "some_count")

    check()
    check("--json", "x.json", "--some-count", "1")
    with pytest.raises(SystemExit):
        check(*given)
    assert says in capsys.readouterr().err


def test_provenance_names_the_model_that_was_asked_for(model: LoadedModel) -> None:
    found = provenance_of(model)
    assert (found["model"], found["model_hash"]) == (MODEL, model.model_hash)
    json.dumps(found)
