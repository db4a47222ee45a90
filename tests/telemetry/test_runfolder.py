"""Guards against overwritten runs, NaN in metrics.json and failures without a traceback."""

import json
import math
from pathlib import Path

import pytest
import yaml

from tokenrouter.telemetry import SECTIONS, RunFolder


def _read(path: Path) -> dict[str, object]:
    result: dict[str, object] = json.loads(path.read_text())
    return result


def test_status_goes_from_running_to_ok(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", job="router=rule")
    assert _read(folder.path / "status.json")["status"] == "running"
    folder.succeed()
    status = _read(folder.path / "status.json")
    assert status["status"] == "ok" and status["job"] == "router=rule"


def test_failure_keeps_the_traceback(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    try:
        raise KeyError("lost")
    except KeyError as error:
        folder.fail(error)
    status = _read(tmp_path / "status.json")
    assert status["status"] == "failed"
    assert "test_failure_keeps_the_traceback" in str(status["traceback"]) and "lost" in str(
        status["error"]
    )


def test_an_interruption_is_a_reason_and_no_traceback(tmp_path: Path) -> None:
    """``KeyboardInterrupt: `` and fifty lines of where the engine happened to be."""
    folder = RunFolder(tmp_path, job="x")
    folder.fail(KeyboardInterrupt())
    status = _read(tmp_path / "status.json")
    assert status["status"] == "failed" and status["error"] == "interrupted by the user"
    assert "traceback" not in status and "finished_at" in status


def test_a_second_run_does_not_overwrite_the_first(tmp_path: Path) -> None:
    RunFolder(tmp_path).succeed()
    with pytest.raises(ValueError, match="already holds a run"):
        RunFolder(tmp_path)


def test_metrics_come_in_the_order_of_the_contract(tmp_path: Path) -> None:
    RunFolder(tmp_path).write_metrics({name: {"x": 1} for name in reversed(SECTIONS)})
    assert tuple(_read(tmp_path / "metrics.json")) == SECTIONS


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_metrics_refuse_what_is_not_a_number_by_name(tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match=r"quality\.kl_mean_nats"):
        RunFolder(tmp_path).write_metrics({"quality": {"kl_mean_nats": value, "ppl": 1.0}})
    assert not (tmp_path / "metrics.json").exists()


def test_metrics_refuse_unknown_sections(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'qualty'.*sections: quality"):
        RunFolder(tmp_path).write_metrics({"qualty": {}})


def test_other_json_nulls_what_is_not_a_number(tmp_path: Path) -> None:
    RunFolder(tmp_path).write_json("x.json", {"a": [math.nan, 1.0], "b": (math.inf,)})
    assert _read(tmp_path / "x.json") == {"a": [None, 1.0], "b": [None]}


def test_steps_are_one_json_object_per_line(tmp_path: Path) -> None:
    RunFolder(tmp_path).write_steps([{"step": 0, "step_ms": 1.5}, {"step": 1, "step_ms": math.nan}])
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 0, "step_ms": 1.5},
        {"step": 1, "step_ms": None},
    ]


@pytest.mark.parametrize("overrides", [[], ["router=rule", 'prompt="a: b, c"', "x='é #'"]])
def test_overrides_survive_yaml(tmp_path: Path, overrides: list[str]) -> None:
    RunFolder(tmp_path).write_config("seed: 0\n", overrides)
    assert yaml.safe_load((tmp_path / "overrides.yaml").read_text()) == overrides
