"""Guards task=doctor against folders that are no run, or a part of one: said, and never called healthy."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.jobs import ROOT, run_in
from tests.tasks.run_folders import make_run
from tokenrouter.tasks.doctor import examine, format_findings
from tokenrouter.tasks.doctor_run import WRITES, read_run


def _rules(path: Path) -> dict[str, str]:
    """What was found, by rule; nothing that could be taken for health is printed beside it."""
    run = read_run(path)
    findings = examine(run)
    assert "Healthy" not in format_findings(run, findings)
    return {finding.rule: finding.seen for finding in findings}


@pytest.mark.parametrize(
    ("gone", "found"),
    [
        (["metrics.json"], {"files_missing": "no metrics.json"}),
        (["config.yaml"], {"files_missing": "no config.yaml"}),
        (["systems.json"], {"files_missing": "no systems.json"}),
        (
            ["provenance.json"],
            {"files_missing": "no provenance.json", "commit_unknown": "no provenance.json"},
        ),
        (
            ["metrics.json", "config.yaml", "provenance.json", "steps.jsonl", "table.md"],
            {
                "files_missing": "no config.yaml, provenance.json, metrics.json",
                "commit_unknown": "no provenance.json",
            },
        ),
    ],
)
def test_a_run_without_its_files_is_not_healthy(
    tmp_path: Path, gone: list[str], found: dict[str, str]
) -> None:
    """ "Healthy: none of 15 rules applies" about a folder that holds status.json alone."""
    run = make_run(tmp_path / "run", {}, {}, {"raw": dict.fromkeys(gone)})
    assert found.items() <= _rules(run).items()


@pytest.mark.parametrize(
    ("name", "text", "seen"),
    [
        ("config.yaml", "router: {", "config.yaml cannot be read as YAML (while parsing"),
        ("config.yaml", "router: 'a", "config.yaml cannot be read as YAML (while scanning"),
        ("config.yaml", "- a\n- b\n", "config.yaml must hold options, and holds ['a', 'b']"),
        ("config.yaml", "", "config.yaml must hold options, and holds 'nothing'"),
        (
            "steps.jsonl",
            '{"num_preemptions": 9}\n7\n{"num',
            "steps.jsonl: 2 of 3 lines are no JSON",
        ),
        ("metrics.json", '{"router": {"overhead_frac": NaN}}', "number at router.overhead_frac"),
        ("metrics.json", "[1]", "metrics.json must hold a JSON object, and holds list"),
        ("provenance.json", "{", "provenance.json cannot be read as JSON"),
        ("status.json", '{"status": "o', "status.json cannot be read as JSON"),
    ],
)
def test_a_half_written_file_is_named_and_the_others_are_read(
    tmp_path: Path, name: str, text: str, seen: str
) -> None:
    """A traceback of the YAML parser; no rule applied, since one file of five was cut short; "overhead nan%"."""
    troubles = {"raw": {name: text}, "steps": [{"num_preemptions": 60}]}
    metrics = {"baselines.static_batch.output_tok_s": 99.0}
    found = _rules(make_run(tmp_path / "run", {}, metrics, troubles))
    assert seen in found["files_damaged"] and "nan%" not in str(found)
    if name != "metrics.json":
        assert {"many_preemptions", "uniform_lengths"} <= set(found)


def test_values_of_another_kind_are_no_crash(tmp_path: Path) -> None:
    """AttributeError or TypeError from a rule, and with it none of the findings."""
    metrics = {"routes": 7, "throughput": [1], "latency.ttft_ms.p99": "fast"}
    run = make_run(tmp_path / "run", {"evaluation": [1]}, {}, {"steps": [{"num_preemptions": "9"}]})
    (run / "metrics.json").write_text(json.dumps(metrics))
    assert not examine(read_run(run))


def test_every_task_says_what_it_writes(tradeoff_run: Path) -> None:
    """A new task whose runs are healthy with half of their files."""
    tasks = {path.stem for path in (ROOT / "conf" / "task").glob("*.yaml")}
    assert set(WRITES) == tasks
    assert not read_run(tradeoff_run).missing and not read_run(tradeoff_run).damaged


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, r"needs the folder of a run: add run=outputs/runs"),
        (lambda path: path / "none", r"none: no such folder; give a run folder, outputs/runs"),
        (lambda path: path, r"is no run: it has no status\.json; give a run folder"),
        (lambda path: _sweep(path), r"it holds 2 of them; name one, e\.g\. run=.*sweep/1"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, make: Any, message: str) -> None:
    path = make(tmp_path)
    overrides = [] if path is None else [f"run={path}"]
    with pytest.raises(ValueError, match=message):
        run_in(tmp_path / "doctor" / "own", "task=doctor", "logger=none", *overrides)


def _sweep(path: Path) -> Path:
    for job in ("0", "1"):
        (path / "sweep").mkdir(exist_ok=True)
        make_run(path / "sweep" / job, {}, {}, {})
    return path / "sweep"
