"""Guards evaluation.tasks: numbers of the wrong system or task, and mistakes that show after the model is loaded."""

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
from tokenrouter.evaluation.harness.runner import (
    LoadedTasks,
    SystemTasks,
    TaskResult,
    TaskSettings,
    tasks_section,
)
from tokenrouter.tasks.checks import check_config
from tokenrouter.telemetry.runfolder import leaves

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
    assert keys == {f"{t}.{k}" for t in ("copa", "svamp") for k in ("acc_frac", "acc_drop_pp", "n")}
    assert tasks["copa"]["n"] == 6 and tasks["svamp"]["n"] == 4
    assert list(systems) == ["all_high", "all_low", "rule"]
    assert systems["all_high"]["high_frac"] == 1.0 and systems["all_low"]["high_frac"] == 0.0
    assert 0.0 < systems["rule"]["high_frac"] < 1.0
    for name, task in tasks.items():
        own, high = (systems[s]["results"][name] for s in ("rule", "all_high"))
        assert len(own["correct"]) == task["n"] and own["acc_frac"] == task["acc_frac"]
        assert task["acc_frac"] == pytest.approx(sum(own["correct"]) / task["n"])
        drop_pp = 100 * (high["acc_frac"] - own["acc_frac"])
        assert task["acc_drop_pp"] == pytest.approx(drop_pp)
    assert systems["all_high"]["results"]["copa"]["acc_frac"] not in (0.0, 1.0)
    table = (run / "table.md").read_text()
    assert "Task copa (6 questions, acc in %): all_high" in table


def test_the_glossary_has_these_names(run: Path) -> None:
    """Keys of a contract that nobody can look up."""
    body = (ROOT / "docs" / "metrics.md").read_text().split("## `quality`")[1].split("\n## ")[0]
    assert all(f"`{name}`" in body for name in ("tasks", "acc_frac", "acc_drop_pp", "n"))


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
    right = TaskResult(num_questions=4, metric="acc,none", acc_frac=0.75)
    wrong = TaskResult(num_questions=4, metric="acc,none", acc_frac=0.5)
    other = TaskResult(num_questions=2)
    high = SystemTasks(results={"a": right, "b": other}, high_frac=1.0)
    chosen = SystemTasks(results={"a": wrong, "b": other}, high_frac=0.0)
    assert tasks_section(chosen, high) == {
        "a": {"n": 4, "acc_frac": 0.5, "acc_drop_pp": 25.0},
        "b": {"n": 2},
    }


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
