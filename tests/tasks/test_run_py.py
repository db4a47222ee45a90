"""Guards the command line: sweeps that share a W&B run, hidden or unreadable errors."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tasks.jobs import ROOT, wandb_exit_codes, wandb_run

TINY = ("debug=tiny", "evaluation.num_windows=1", "evaluation.decode_windows=1")


def _run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    process = _start(tmp_path, *arguments)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("HYDRA_FULL_ERROR", None)
    return subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), *arguments, f"paths.output_dir={tmp_path}"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A child of a job in the background may be born deaf to Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
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


@pytest.mark.parametrize("sweep", [False, True], ids=["run", "sweep"])
def test_ctrl_c_is_one_line_and_ends_the_sweep(tmp_path: Path, sweep: bool) -> None:
    """A traceback of wherever the engine was, in status.json and on the terminal."""
    long = ("sampling.max_tokens=4000", "sampling.ignore_eos=true")
    jobs = ("-m", "seed=1,2") if sweep else ()
    process = _start(tmp_path, *jobs, "debug=tiny", "task=generate", "prompt=hi", *long)
    try:
        while not list(tmp_path.rglob("provenance.json")):  # written just before the first token
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in out + err
    assert "interrupted by the user; what was written lies in " in out + err
    [path] = tmp_path.rglob("status.json")
    status = json.loads(path.read_text())
    assert status["status"] == "failed" and status["error"] == "interrupted by the user"
    assert "traceback" not in status and not (path.parent / "metrics.json").exists()


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
