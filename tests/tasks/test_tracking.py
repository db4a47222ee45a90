"""Guards results against their tracker: a broken connection failed the job and hid its table."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tasks.jobs import compose_config, run_in
from tokenrouter.tasks.common import Job, open_job
from tokenrouter.tasks.tracking import WandbRun

TINY = ("debug=tiny", "evaluation.num_windows=1", "evaluation.decode_windows=1")


def _services() -> list[psutil.Process]:
    children = psutil.Process(os.getpid()).children(recursive=True)
    return [child for child in children if child.name().startswith("wandb-core")]


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [r for r in caplog.records if r.name == "tokenrouter.tasks.tracking"]
    return [record.getMessage() for record in records]


def test_a_job_whose_tracker_dies_still_shows_and_keeps_its_results(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """SIGINT to W&B's own process: "failed: Connection lost", the table never printed."""
    finish = Job.finish
    shown_before: list[str] = []

    def break_then_finish(job: Job, *arguments: Any) -> None:
        shown_before.append(capsys.readouterr().out)
        for service in _services():
            service.send_signal(signal.SIGINT)
            service.wait(timeout=30)
        finish(job, *arguments)

    monkeypatch.setattr(Job, "finish", break_then_finish)
    run_in(tmp_path / "broken", *TINY, "logger=wandb")
    assert "all_high" in shown_before[0] and "all_low" in shown_before[0]
    assert json.loads((tmp_path / "broken" / "status.json").read_text())["status"] == "ok"
    assert (tmp_path / "broken" / "metrics.json").exists()
    [text] = _warnings(caplog)
    for part in ("the metrics", "tradeoff.png, routes.png", "end", str(tmp_path / "broken")):
        assert part in text
    with open_job(compose_config("debug=tiny", "logger=wandb"), tmp_path / "next", []):
        pass  # the sweep's next job starts a service of its own
    assert json.loads((tmp_path / "next" / "status.json").read_text())["status"] == "ok"
    assert len(_warnings(caplog)) == 1


class Run:
    """A W&B run that refuses some of its calls."""

    def __init__(self, *refused: str) -> None:
        self.refused, self.calls = refused, list[str]()
        self.id, self.summary = "run", dict[str, Any]()

    def log(self, values: dict[str, Any]) -> None:
        self._call(next(iter(values)))

    def define_metric(self, name: str, **_: Any) -> None:
        self._call(f"define {name}")

    def log_artifact(self, artifact: Any) -> None:
        self._call(f"artifact {artifact.name}")

    def finish(self, exit_code: int) -> None:
        self._call(f"finish {exit_code}")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.refused:
            raise OSError(f"no {name}")


def test_the_warning_names_only_what_was_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One refused value that takes the rest with it, or a warning that blames all."""
    run = Run("kv/a")
    tracked = WandbRun(run, tmp_path)
    tracked.log_metrics({"kv": {"a": 1}})
    tracked.log_metrics({"kv": {"b": 1}})
    tracked.finish(0)
    assert run.calls == ["kv/a", "kv/b", "finish 0"]
    [text] = _warnings(caplog)
    assert "did not log the metrics (OSError: no kv/a)" in text and "end" not in text


def test_a_failing_job_keeps_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The tracker's error in the place of the job's."""
    import wandb

    monkeypatch.setattr(wandb, "init", lambda **_: Run("finish 1"))
    cfg = compose_config("debug=tiny", "logger=wandb")
    with pytest.raises(RuntimeError, match="broken"), open_job(cfg, tmp_path, []):
        raise RuntimeError("broken")
    assert "RuntimeError: broken" in json.loads((tmp_path / "status.json").read_text())["error"]
    assert "the run's end (exit code 1)" in _warnings(caplog)[0]
