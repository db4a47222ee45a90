"""Guards task=report from the command to the screen: what it writes, refuses, and shows of hostile folders."""

import json
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import InstantiationException

from tests.tasks.browser import Page
from tests.tasks.jobs import run_in
from tests.tasks.run_folders import make_run
from tests.tasks.test_explain import HOSTILE
from tokenrouter.evaluation.plots import figure_of
from tokenrouter.tasks.common import root_cause
from tokenrouter.telemetry import RunFolder

TASK = ("task=report", "logger=none")
SPREAD = {"median": 9.0, "min": 8.0, "max": 10.0}


def _hostile_run(path: Path, systems: tuple[str, ...]) -> Path:
    """A run each of whose texts tries to leave its place."""
    folder = RunFolder(path, job=HOSTILE)
    folder.write_config("a: 1\n", [f"prompt={HOSTILE}"])
    where = {"cpu": HOSTILE, "num_cpus": 2, "devices": [HOSTILE]}
    facts = {"commit": HOSTILE, "model": HOSTILE, "model_hash": HOSTILE, HOSTILE: HOSTILE}
    folder.write_json("provenance.json", facts | {"hardware": where})
    folder.write_json("metrics.json", {"router": {"version": HOSTILE, HOSTILE: [HOSTILE]}})
    rows = [{"name": s, "chosen": s == HOSTILE, "output_tok_s": SPREAD} for s in systems]
    folder.write_json("systems.json", {"rows": rows, "notes": [HOSTILE]})
    with figure_of(2.0, 1.0) as (figure, _):
        figure.savefig(path / "onerror='x' \"tradeoff.png")
    folder.succeed()
    return path


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on two hostile runs, of which one compares nothing, and on a failed one with a hostile reason."""
    root = tmp_path_factory.mktemp("report")
    _hostile_run(root / "runs" / "<b>1", ("all_high", HOSTILE))
    _hostile_run(root / "runs" / "<b>2", ())
    RunFolder(root / "runs" / "<b>3").fail(ValueError(HOSTILE))
    return run_in(root / "own", *TASK, f"report.runs=['{root}/runs']")


def test_real_runs_and_one_that_failed(
    tmp_path: Path, tradeoff_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Columns that no run of today has; figures that are not found; a failure that only the file knows of."""
    RunFolder(tmp_path / "failed").fail(ValueError("no room"))
    asked = f"report.runs=['{tradeoff_run}','{tmp_path}/fail*']"
    path = run_in(tmp_path / "own", "task=report", "logger=wandb", "log_decisions=true", asked)
    assert not (path / "wandb").exists(), "there is nothing to track"
    text = (path / "report.html").read_text(encoding="utf-8")
    for name in ("all_high", "static_batch", "<h2>1: debug=tiny", "<code>debug=tiny</code>"):
        assert name in text
    for title in ("output tok/s", "times all_high", "KL mnat", "KL decode mnat", "router %"):
        assert f"<th>{title}</th>" in text
    metrics = json.loads((tradeoff_run / "metrics.json").read_text())
    assert f">{metrics['throughput']['output_tok_s']:.5g}</td>" in text
    assert text.count("data:image/png;base64,") == len(list(tradeoff_run.glob("*.png"))) == 2
    summary = json.loads((path / "report.json").read_text())
    [run], [left_out] = summary["runs"], summary["left_out"]
    assert run["number"] == 1 and run["path"] == str(tradeoff_run)
    assert left_out["reason"].startswith("the run failed (ValueError: no room)")
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert any("log_decisions=true has no effect with task=report" in each for each in warned)
    assert any("left out: " in each and "no room" in each for each in warned)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ("null", "needs the folders of runs: add"),
        ("[]", "needs the folders of runs: add"),
        ("3", "report.runs must be a list of folders, got 3"),
        ("[null]", "report.runs must be a list of folders"),
        ("no/such/folder", "no/such/folder is no folder, and no pattern"),
        ("[HERE,no/such]", "no/such is no folder, and no pattern"),
        ("[HERE]", "holds no run to report on: HERE/0 the run has not ended"),
        ("HERE/own", "holds no run to report on: no folder"),
    ],
)
def test_mistakes_are_refused_by_name(tmp_path: Path, runs: str, message: str) -> None:
    """A traceback, or a page that shows nothing, for what the user could put right."""
    RunFolder(tmp_path / "0")
    with pytest.raises((ValueError, InstantiationException)) as caught:
        run_in(tmp_path / "own", *TASK, f"report.runs={runs.replace('HERE', str(tmp_path))}")
    assert message.replace("HERE", str(tmp_path)) in str(root_cause(caught.value))
    assert not list((tmp_path / "own").glob("report.*"))


def test_runs_written_by_hand_have_no_systems(tmp_path: Path) -> None:
    """An empty systems.json, as of a run that was cut short, read as a run without systems."""
    make_run(tmp_path / "0", {}, {}, {})
    with pytest.raises(ValueError, match="schema version None"):
        run_in(tmp_path / "own", *TASK, f"report.runs={tmp_path}")


def test_nothing_of_a_run_leaves_its_place(report: Path) -> None:
    """A name, a note, a fact, a reason or a file name that becomes a tag."""
    text = (report / "report.html").read_text(encoding="utf-8")
    for tag in ("<script", "<b>", "<style>*", "<!-- ", 'onerror="document'):
        assert tag not in text
    assert text.count("&lt;script&gt;") >= 15 and text.count("<img ") == 2
    summary = json.loads((report / "report.json").read_text())
    assert [len(summary[key]) for key in ("runs", "left_out")] == [2, 1]


def test_a_browser_shows_everything_and_runs_nothing(report: Path, page: Page) -> None:
    """Errors, a script that runs, pictures that do not show, a column that is a letter wide, links to nowhere."""
    page.open(report / "report.html")
    assert page.complaints == []
    assert page.evaluate("document.title") == "Runs side by side"
    assert page.evaluate("document.querySelectorAll('script, body style, b').length") == 0
    shown: list[Any] = page.evaluate("[...document.images].map(i => i.naturalWidth > 100)")
    assert shown == [True, True]
    assert page.evaluate("document.querySelector('section h2').innerText.includes('<script>')")
    assert page.evaluate(
        "[...document.querySelectorAll('a')].every(a => document.querySelector(a.hash))"
    )
    assert page.evaluate("document.querySelectorAll('a').length") >= 3
    widths = page.evaluate("[...document.querySelectorAll('.wide td')].map(c => c.clientWidth)")
    assert min(widths) > 30
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
