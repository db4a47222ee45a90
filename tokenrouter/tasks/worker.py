"""A process that runs one job after the other, so that libraries and the model are loaded once for many runs.

``python -m tokenrouter.tasks.worker`` reads a JSON object per line: ``overrides``, ``folder`` and ``log``; when the job
is over it answers with its exit code, a line too. What the job prints goes to its log. ``Worker`` is the other end.
"""

import gc
import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from tokenrouter.tasks import build
from tokenrouter.tasks.common import open_job
from tokenrouter.telemetry.provenance import ROOT


class Worker:
    """Runs jobs in a process of its own; one that dies with a job is replaced for the next.

    A context manager: the process ends with it.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            if error is not None:
                self._process.kill()
            self._end()

    def run(self, overrides: Sequence[str], folder: Path, log: Path) -> int:
        """Runs a job to its end.

        Args:
            overrides: of the config.
            folder: of the run, which does not exist yet.
            log: a file for what the job prints; overwritten.

        Returns:
            0; 1 where it failed; below 0 the signal that ended the process.
        """
        log.write_bytes(b"")
        job = {"overrides": list(overrides), "folder": str(folder), "log": str(log)}
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            print(json.dumps(job), file=process.stdin, flush=True)
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        return int(answer) if answer else self._end() or 1

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return self._process

    def _end(self) -> int:
        """Exit code of the process, which is told that there is no more to do."""
        process, self._process = self._process, None
        assert process is not None
        process.communicate()
        return process.returncode


def main() -> None:
    """Runs the jobs that stdin names, until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.captureWarnings(True)
    num_threads = torch.get_num_threads()
    with build.models_kept():
        for line in sys.stdin:
            torch.set_num_threads(num_threads)  # a job may have set its own
            returncode = _run(**json.loads(line))
            gc.collect()
            print(returncode, file=answers, flush=True)


def _run(overrides: Sequence[str], folder: str, log: str) -> int:
    with Path(log).open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    try:
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            cfg: Any = compose("config", overrides=list(overrides))
        with open_job(cfg, Path(folder), overrides) as job:
            instantiate(cfg.task)(job)
    except Exception:  # whatever it is: the next job goes on
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    main()
