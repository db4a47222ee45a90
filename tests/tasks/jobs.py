"""Composes conf/ and runs jobs in this process, on a tiny random model."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig

from tokenrouter.tasks.common import open_job

ROOT = Path(__file__).resolve().parents[2]


def compose_config(*overrides: str) -> DictConfig:
    """The config that ``python run.py <overrides>`` composes."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def run_in(path: Path, *overrides: str) -> Path:
    """Runs a job in ``path``, as run.py does."""
    with open_job(compose_config(*overrides), path, overrides) as job:
        instantiate(job.cfg.task)(job)
    return path


def run_py(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs run.py in a process of its own, with ``folder`` for its output."""
    process = start_py(folder, *arguments)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start_py(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Starts it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("HYDRA_FULL_ERROR", None)
    return subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), *arguments, f"paths.output_dir={folder}"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A child of a job in the background may be born deaf to Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wandb_records(folder: Path) -> Iterator[Any]:
    """The records of the one offline W&B run in a run folder (LevelDB log format)."""
    internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    [path] = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        position += 7 + length
        if position > len(data):
            return  # this record is still being written
        parts += data[position - length : position]
        if kind in (1, 4):
            record = internal.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def wandb_exit_codes(folder: Path) -> list[int]:
    """Exit codes of the run: empty when it was never closed."""
    return [record.exit.exit_code for record in settled_records(folder, "exit")]


def wandb_run(folder: Path) -> Any:
    """The run's own record: id, name, group, config."""
    [record] = settled_records(folder, "run")
    return record.run


def wandb_config(folder: Path) -> dict[str, Any]:
    """The config that the run was opened with."""
    return {item.key: json.loads(item.value_json) for item in wandb_run(folder).config.update}


def wandb_summary(folder: Path) -> dict[str, Any]:
    """The summary by key, as it was set last; complete when the run is closed."""
    items = [i for r in settled_records(folder, "summary") for i in r.summary.update]
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def wandb_artifacts(folder: Path) -> dict[str, list[str]]:
    """Paths in the run's artifacts, by the artifact's type."""
    found = [record.artifact for record in settled_records(folder, "artifact")]
    return {a.type: [content.path for content in a.manifest.contents] for a in found}


def settled_records(folder: Path, kind: str) -> list[Any]:
    """The run's records of one kind. The file may lag behind a little, so an empty answer is asked again."""
    found: list[Any] = []
    for _ in range(100):
        found = [r for r in wandb_records(folder) if r.WhichOneof("record_type") == kind]
        if found:
            break
        time.sleep(0.1)
    return found
