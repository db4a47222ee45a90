"""Guards task=doctor as a job of its own: what it opens and leaves, and what it says of a run that was interrupted."""

import json
from pathlib import Path

import pytest

from tests.tasks.jobs import compose_config, run_in
from tokenrouter.tasks.common import open_job
from tokenrouter.tasks.doctor import examine
from tokenrouter.tasks.doctor_run import read_run


def test_a_tracker_is_neither_opened_nor_needed(
    tmp_path: Path,
    tradeoff_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A W&B run, which held nothing, for every look into a folder; none where W&B could not start."""
    import wandb

    def init(**_: object) -> None:
        raise AssertionError("a W&B run was opened")

    monkeypatch.setattr(wandb, "init", init)
    for name, more in (("default", []), ("asked", ["logger=wandb", "log_decisions=true"])):
        run_in(tmp_path / name, "task=doctor", f"run={tradeoff_run}", *more)
        assert json.loads((tmp_path / name / "status.json").read_text())["status"] == "ok"
        assert (tmp_path / name / "doctor.json").exists()
        assert not (tmp_path / name / "decisions.parquet").exists()
    [warning] = [r.getMessage() for r in caplog.records if r.name == "tokenrouter.tasks.doctor"]
    assert "log_decisions=true has no effect with task=doctor" in warning


def test_an_interrupted_run_is_no_riddle(tmp_path: Path) -> None:
    """A failure that says "KeyboardInterrupt: " and asks to be mended."""
    with pytest.raises(KeyboardInterrupt), open_job(compose_config("debug=tiny"), tmp_path, []):
        raise KeyboardInterrupt
    [finding] = examine(read_run(tmp_path))
    assert finding.rule == "run_failed" and finding.seen == "interrupted by the user"
    assert "interruption by the user nothing needs mending" in finding.cure
