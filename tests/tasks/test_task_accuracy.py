"""Guards evaluation.tasks: numbers of the wrong system or task, and mistakes that show after the model is loaded."""

import csv
import importlib.util
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.jobs import ROOT, compose_config, run_in
from tokenrouter.evaluation.harness import runner
from tokenrouter.evaluation.harness.results import (
    SystemTasks,
    TaskResult,
    accuracy_table,
    task_rows,
    tasks_section,
)
from tokenrouter.evaluation.harness.runner import LoadedTasks, TaskSettings
from tokenrouter.tasks.checks import check_config
from tokenrouter.telemetry.runfolder import leaves

MEASURES = (
    "n",
    "acc_frac",
    "acc_stderr_pp",
    "acc_drop_pp",
    "acc_drop_stderr_pp",
    "only_high_right",
    "only_own_right",
    "mcnemar_p",
)
OF_TEXTS = ("same_output_frac", "common_tokens_mean", "length_ratio", "chrf")
TINY = ("debug=tiny", "task=evaluate", "evaluation=lm_eval", "evaluation.window_tokens=128")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two sets of the local formats: choices, and generated numbers."""
    folder = tmp_path_factory.mktemp("data")
    questions = [
        {
            "query": f"Number {i} follows, because",
            "choices": ["it is", "they were", "x"],
            "gold": i % 3,
        }
        for i in range(9)
    ]
    problems = [{"context": f"How much is {i} and 1?", "answer": str(i + 1)} for i in range(4)]
    for name, rows in (("copa", questions), ("svamp", problems)):
        (folder / name).mkdir()
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name / f"{name}.jsonl").write_text(text)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """A job with both."""
    pytest.importorskip("lm_eval")
    path = tmp_path_factory.mktemp("tasks")
    more = (f"paths.data_dir={data_dir}", "evaluation.tasks=[copa,svamp]", "evaluation.limit=6")
    return run_in(path, *TINY, *more)


def test_metrics_hold_accuracy_and_its_drop(run: Path) -> None:
    """A drop of the wrong sign, or against another baseline."""
    metrics, systems = (
        json.loads((run / f"{name}.json").read_text()) for name in ("metrics", "tasks")
    )
    tasks = metrics["quality"]["tasks"]
    keys = {path for path, _ in leaves(tasks)}
    expected = {f"{task}.{name}" for task in ("copa", "svamp") for name in MEASURES}
    assert keys == expected | {f"svamp.{name}" for name in OF_TEXTS}
    assert tasks["copa"]["n"] == 6 and tasks["svamp"]["n"] == 4
    assert list(systems) == ["all_high", "all_low", "request_level", "rule"]
    rows = json.loads((run / "systems.json").read_text())["rows"]
    for row in rows:
        own = systems["all_high" if row["name"] == "static_batch" else row["name"]]["results"]
        for task in ("copa", "svamp"):
            assert row[f"tasks.{task}.acc_frac"] == own[task]["acc_frac"]
            assert 0 <= row[f"tasks.{task}.acc_stderr_frac"] < 0.5
    chosen = next(row for row in rows if row["chosen"])
    assert chosen["tasks.copa.acc_frac"] == tasks["copa"]["acc_frac"]
    assert systems["all_high"]["high_frac"] == 1.0 and systems["all_low"]["high_frac"] == 0.0
    assert 0.0 < systems["rule"]["high_frac"] < 1.0
    for name, task in tasks.items():
        own, high = (systems[s]["results"][name] for s in ("rule", "all_high"))
        assert len(own["correct"]) == task["n"] and own["acc_frac"] == task["acc_frac"]
        assert task["acc_frac"] == pytest.approx(sum(own["correct"]) / task["n"])
        drop_pp = 100 * (high["acc_frac"] - own["acc_frac"])
        assert task["acc_drop_pp"] == pytest.approx(drop_pp)
    assert systems["all_high"]["results"]["copa"]["acc_frac"] not in (0.0, 1.0)


def test_the_table_and_the_csv_hold_every_system(run: Path) -> None:
    """Only the run's own accuracy, without what it lost; an error of the difference as if it were not paired."""
    rows = list(csv.DictReader((run / "accuracy.csv").open()))
    systems = ["all_high", "all_low", "request_level", "rule"]
    assert [(row["task"], row["system"]) for row in rows] == [
        (task, system) for task in ("copa", "svamp") for system in systems
    ]
    own = json.loads((run / "metrics.json").read_text())["quality"]["tasks"]["copa"]
    [row] = [row for row in rows if row["task"] == "copa" and row["system"] == "rule"]
    assert {name: float(row[name]) for name in MEASURES} == pytest.approx(own)
    assert row["verdict"] in ("tie", "worse", "better") and rows[0]["verdict"] == ""
    table = (run / "table.md").read_text()
    [line] = [line for line in table.splitlines() if line.startswith("| copa  | **rule**")]
    assert row["verdict"] in line and f"{100 * float(row['acc_frac']):.1f} ± " in line
    assert "request_level's answers are computed, not run" in table


def test_request_level_answers_as_both_sides_do(run: Path) -> None:
    """Answers that neither side gave: of another question, or of choices that went different ways."""
    systems = json.loads((run / "tasks.json").read_text())
    for task, kind, count in (("copa", "correct", 6), ("svamp", "texts", 4)):
        own, *sides = (
            systems[name]["results"][task][kind]
            for name in ("request_level", "all_high", "all_low")
        )
        assert len(own) == count
        assert all(value in pair for value, *pair in zip(own, *sides, strict=True))
    assert systems["all_high"]["results"]["copa"]["texts"] == []
    assert 0.0 <= systems["request_level"]["high_frac"] <= 1.0


def test_the_glossary_has_these_names(run: Path) -> None:
    """Keys of a contract that nobody can look up."""
    body = (ROOT / "docs" / "metrics.md").read_text().split("## `quality`")[1].split("\n## ")[0]
    assert all(f"`{name}`" in body for name in ("tasks", *MEASURES, *OF_TEXTS))


def test_answers_do_not_depend_on_the_system_before(data_dir: Path) -> None:
    """Examples drawn anew for each system: then they answer other questions."""
    pytest.importorskip("lm_eval")
    from tests.evaluation.harness.texts import tiny_pair
    from tokenrouter import LLM

    settings = TaskSettings(tasks=["copa"], num_fewshot=2, limit=5, data_dir=str(data_dir))
    tasks = LoadedTasks(settings)
    llm = LLM(tiny_pair(1024)[0])
    first, again = tasks.measure(llm), tasks.measure(llm)
    assert first == again and first.results["copa"].num_questions == 5


def test_a_task_without_an_accuracy_has_no_drop() -> None:
    """A drop of 0 that was never measured."""
    right = TaskResult(num_questions=2, metric="acc,none", acc_frac=0.5, correct=(1.0, 0.0))
    wrong = TaskResult(num_questions=2, metric="acc,none", acc_frac=0.0, correct=(0.0, 0.0))
    other = TaskResult(num_questions=2)
    high = SystemTasks(results={"a": right, "b": other}, high_frac=1.0)
    low = SystemTasks(results={"a": wrong, "b": other}, high_frac=0.0)
    rows = task_rows({"all_high": high, "all_low": low}, list)
    section = tasks_section(rows, "all_low", low.results)
    assert section["b"] == {"n": 2} and section["a"]["acc_drop_pp"] == 50.0
    own = tasks_section(rows, "all_high", high.results)["a"]
    assert own["acc_drop_pp"] == 0.0 and "mcnemar_p" not in own
    assert "| a    | **all_low** |  2 |" in accuracy_table(rows, "all_low")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["evaluation.tasks=[cupa]"],
            r"no task 'cupa'; did you mean copa\? On local data: arc_easy",
        ),
        (["evaluation.tasks=copa"], r"must be a list of names, such as \[arc_easy,piqa\]"),
        (["evaluation.tasks=[copa,copa]"], "names a task twice"),
        (["evaluation.limit=0"], "evaluation.limit must be at least 1"),
        (["evaluation.limit=1.5"], "evaluation.limit must be an integer"),
        (["evaluation.num_fewshot=-1"], "evaluation.num_fewshot must be at least 0"),
        (["evaluation.apply_chat_template=1"], "evaluation.apply_chat_template"),
        (["paths.data_dir=null"], "needs a folder of local data sets: set TOKENROUTER_DATA_DIR"),
        (["paths.data_dir=/no/such"], "no file /no/such/copa/copa.jsonl; set TOKENROUTER_DATA_DIR"),
    ],
)
def test_mistakes_show_before_a_model_is_loaded(
    tmp_path: Path,
    data_dir: Path,
    overrides: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An hour of KL first, and then the name that was misspelt."""
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("tokenrouter.tasks.build.load", lambda *_, **__: pytest.fail("loaded"))
    given = [f"paths.data_dir={data_dir}", "evaluation.tasks=[copa]", *overrides]
    with pytest.raises(ValueError, match=says):
        run_in(tmp_path, *TINY, *given)


def test_a_missing_harness_is_named(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ImportError from inside, of a package that the user never heard of."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        runner.importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find(name)
    )
    with pytest.raises(ValueError, match=r"not installed: pip install .*\[lm-eval\]"):
        LoadedTasks(TaskSettings(tasks=["copa"], data_dir=str(data_dir)))


def test_the_harness_is_imported_when_it_is_asked_for() -> None:
    """Seconds of import, and a package that is an extra, for every run."""
    code = "import sys, tokenrouter.tasks.compare; assert 'lm_eval' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def _said(*overrides: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_config(compose_config(*overrides))
    return [str(w.message) for w in caught if "options without effect" in str(w.message)]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["task=benchmark", "evaluation=lm_eval"], "evaluation.tasks (this task measures no"),
        (["evaluation.limit=5"], "evaluation.limit (no task is asked for"),
    ],
)
def test_what_nothing_reads_is_named(overrides: list[str], says: str) -> None:
    """A limit that was set and cut nothing."""
    [said] = _said(*overrides)
    assert says in said


@pytest.mark.parametrize("task", ["evaluate", "tradeoff"])
def test_what_is_read_is_left_alone(task: str) -> None:
    assert _said(f"task={task}", "evaluation=lm_eval", "evaluation.limit=5") == []


def test_an_error_of_the_hub_names_the_local_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback of ten libraries where the machine is offline."""
    tasks: Any = pytest.importorskip("lm_eval.tasks")

    def fail(*_: object) -> None:
        raise ConnectionError("offline mode is enabled")

    monkeypatch.setattr(tasks.TaskManager, "load", fail)
    with pytest.raises(ValueError, match=r"could not be loaded \(offline mode.*arc_easy, boolq"):
        LoadedTasks(TaskSettings(tasks=["copa"]))
