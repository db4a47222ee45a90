"""Guards the command line: hidden or unreadable errors, Ctrl-C that ends a sweep's job only."""

import json
import signal
import time
from pathlib import Path

import pytest

from tests.tasks.jobs import run_py, start_py

TINY = ("debug=tiny", "evaluation.num_windows=1", "evaluation.decode_windows=1")


def test_a_users_mistake_is_one_line_without_traceback(tmp_path: Path) -> None:
    done = run_py(tmp_path, *TINY, "data=wikitext2", "paths.data_dir=/nowhere")
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
    process = start_py(tmp_path, *jobs, "debug=tiny", "task=generate", "prompt=hi", *long)
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
    done = run_py(tmp_path, argument)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words)
    assert not list(tmp_path.glob("runs/*/*/status.json"))
