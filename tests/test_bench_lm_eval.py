"""Guards the lm-eval benchmark: sides that get other requests, a ratio upside down, answers that nobody compared."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from scripts.lm_eval_bench import app
from scripts.lm_eval_bench.measures import ALL, Measured, compare_answers
from scripts.lm_eval_bench.setup import OURS, THEIRS
from tests.evaluation.harness.texts import requests, tiny_pair


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {"query": f"Number {i} follows, because", "choices": ["it is", "they were"], "gold": i % 2}
        for i in range(6)
    ]
    for path in ("copa/copa.jsonl", "openbookqa/openbook_qa.jsonl"):
        (folder / path).parent.mkdir()
        (folder / path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "svamp").mkdir()
    (folder / "svamp/svamp.jsonl").write_text('{"context": "1 + 1?", "answer": "2"}\n')
    return folder


@pytest.fixture(scope="module")
def printed(data_dir: Path) -> list[str]:
    """What the script prints with ``--quick`` on a tiny float32 model, in lines."""
    shown = io.StringIO()
    options = ["--quick", "--repeats", "2", "--data-dir", str(data_dir)]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(shown):
        patch.setattr("sys.argv", ["x.py", *options, "--tasks", "copa", "openbookqa"])
        patch.setattr(app, "load_model", lambda *_, **__: tiny_pair(1024)[0])
        patch.setattr(app, "hf_model_for", lambda *_, **__: tiny_pair(1024)[1])
        app.main("")
    return shown.getvalue().splitlines()


def test_every_key_that_others_read_is_there(printed: list[str]) -> None:
    result: dict[str, Any] = json.loads(printed[-1])
    low, high = result["ranges"]["lm_eval_vs_transformers"]
    assert 0.0 < low <= result["lm_eval_vs_transformers"] <= high
    assert list(result["tasks"]) == ["copa", "openbookqa", ALL] and result["limit"] == 4
    assert [one["requests"] for one in result["tasks"].values()] == [8, 8, 16]
    assert result["max_distance_nats"] < 1e-3 and result["other_choices"] == 0
    assert result["questions"] == 8 and result["provenance"]["model_hash"] and result["quick"]
    assert [line.split()[0] for line in printed[-5:-2]] == ["copa", "openbookqa", ALL]


def test_the_ratio_is_above_one_where_ours_is_faster() -> None:
    one = Measured(num_requests=12, seconds={OURS: [2.0, 3.0], THEIRS: [4.0, 12.0]})
    assert (one.ratio.min, one.ratio.max) == (2.0, 4.0)
    assert one.requests_s(OURS).max == 6.0


def test_other_choices_are_counted_by_question() -> None:
    asked = requests("loglikelihood", [("a", "b")] * 4)
    for index, request in enumerate(asked):
        request.doc_id = index // 2
    ours, theirs = ([(s, False) for s in scores] for scores in ((-1, -2, -3, -4), (-1, -2, -4, -3)))
    found = compare_answers({"t": asked}, {("t", OURS): ours, ("t", THEIRS): theirs})
    assert found["other_choices"] == 1 and found["questions"] == 2
    assert (found["max_distance_nats"], found["mean_distance_nats"]) == (1, 0.5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tasks", "svamp"], "svamp is no multiple choice"),
        (["--tasks", "copas"], "did you mean copa"),
        (["--tasks", "copa", "--data-dir", "/no/such"], "no file /no/such/copa"),
    ],
)
def test_mistakes_are_one_line(
    data_dir: Path, options: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["x.py", "--data-dir", str(data_dir), *options])
    with pytest.raises(SystemExit, match=says):
        app.main("")
