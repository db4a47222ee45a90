"""Guards the command line: sweeps that share a W&B run, hidden or unreadable errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tasks.jobs import ROOT, wandb_exit_codes, wandb_run

TINY = ("debug=tiny", "evaluation.num_windows=1", "evaluation.decode_windows=1")


def _run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("HYDRA_FULL_ERROR", None)
    return subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *arguments, f"paths.output_dir={tmp_path}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_a_sweep_is_one_folder_and_one_wandb_run_per_job(tmp_path: Path) -> None:
    done = _run(tmp_path, "-m", *TINY, "logger=wandb", "router=all_high,rule", "task=benchmark")
    assert done.returncode == 0, done.stderr
    [sweep] = tmp_path.glob("sweeps/*/*")
    jobs = [sweep / "0", sweep / "1"]
    assert len({wandb_run(job).run_id for job in jobs}) == 2
    assert {wandb_run(job).run_group for job in jobs} == {sweep.name}
    assert [wandb_exit_codes(job) for job in jobs] == [[0], [0]]
    for job, router in zip(jobs, ("all_high", "rule"), strict=True):
        metrics = json.loads((job / "metrics.json").read_text())
        assert metrics["router"]["version"].startswith(router)
        assert f"router={router}" in json.loads((job / "status.json").read_text())["job"]


@pytest.mark.slow
def test_a_failing_job_of_a_sweep_shows_its_error_and_spares_the_others(tmp_path: Path) -> None:
    done = _run(tmp_path, "-m", *TINY, "logger=wandb", "task=benchmark", "model.name=gpt,llama")
    assert done.returncode != 0
    assert "no tiny model of family 'gpt'" in done.stderr + done.stdout
    [sweep] = tmp_path.glob("sweeps/*/*")
    status = [json.loads((sweep / job / "status.json").read_text()) for job in ("0", "1")]
    assert [s["status"] for s in status] == ["failed", "ok"]
    assert "Traceback" in status[0]["traceback"]
    assert [wandb_exit_codes(sweep / job) for job in ("0", "1")] == [[1], [0]]


def test_a_users_mistake_is_one_line_without_traceback(tmp_path: Path) -> None:
    done = _run(tmp_path, *TINY, "data=wikitext2", "paths.data_dir=/nowhere")
    text = done.stderr + done.stdout
    assert done.returncode == 1 and "Traceback" not in text
    assert "no folder /nowhere/wikitext2; set TOKENROUTER_DATA_DIR" in text
    [status] = tmp_path.glob("runs/*/*/status.json")
    assert "Traceback" in json.loads(status.read_text())["traceback"]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("router=rul", ("rule", "all_high", "layerwise")),
        ("executor=int9", ("int8", "full")),
        ("router.first_position=3", ("first_position",)),
    ],
)
def test_an_unknown_name_lists_the_choices(
    tmp_path: Path, argument: str, words: tuple[str, ...]
) -> None:
    done = _run(tmp_path, argument)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words)
    assert not list(tmp_path.glob("runs/*/*/status.json"))
