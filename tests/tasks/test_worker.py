"""Guards the process that runs many jobs: one that dies with a job, and a job that sees what another left."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks.jobs import compose_config
from tokenrouter.tasks import build, worker

TINY = ("task=generate", "debug=tiny", "logger=none", "prompt=a")


@pytest.mark.slow
def test_a_worker_outlives_failing_jobs_and_a_dead_one_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against jobs that are not run because another killed the process, and against two processes."""
    started = []

    class Recorded(subprocess.Popen[str]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(worker.subprocess, "Popen", Recorded)

    def run(name: str, *overrides: str) -> int:
        return own.run([*TINY, *overrides], tmp_path / name, tmp_path / f"{name}.log")

    with worker.Worker() as own:
        assert run("ok", "num_threads=1") == 0
        assert (tmp_path / "ok/status.json").exists()
        assert run("no_config", "router=reuter") == 1
        assert "reuter" in (tmp_path / "no_config.log").read_text()
        assert run("bad", "num_threads=0") == 1
        assert "num_threads" in (tmp_path / "bad.log").read_text()
        assert len(started) == 1
        started[0].kill()
        started[0].wait()
        assert run("killed") == -9
        assert run("after") == 0
        assert len(started) == 2
    assert started[1].returncode == 0


def test_models_are_kept_by_their_config_and_only_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against another model's weights in a run, and memory that grows with each model."""
    tiny = compose_config("debug=tiny")
    other = compose_config("debug=tiny", "model.name=qwen3")
    assert build.load(tiny, "float32") is not build.load(tiny, "float32")
    with build.models_kept():
        first = build.load(tiny, "float32")
        assert build.load(tiny, "float32") is first
        assert build.load(tiny, "bfloat16").dtype == torch.bfloat16
        changed = build.load(other, "float32")
        assert changed.model_hash != first.model_hash
        assert build.load(tiny, "float32") is not first, "the last one alone is kept"
    assert build.load(tiny, "float32") is not build.load(tiny, "float32")
