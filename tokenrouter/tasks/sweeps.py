"""Sweeps (``-m``): what they need installed, what is said of them at their end, and their exit code."""

import atexit
import json
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from tokenrouter.files import replace_file
from tokenrouter.tasks.finished import run_folders
from tokenrouter.telemetry.runfolder import read_status
from tokenrouter.wording import counted

log = logging.getLogger(__name__)
EXTRAS = {
    "hparams_search=": ("hydra_optuna_sweeper", "optuna"),
    "hydra/sweeper=optuna": ("hydra_optuna_sweeper", "optuna"),
    "hydra/launcher=joblib": ("hydra_joblib_launcher", "joblib"),
    "hydra/launcher=submitit": ("hydra_submitit_launcher", "submitit"),
}
"""By how an argument begins: the plugin that it needs, and the extra that installs it."""
TIMED_TASKS = ("tokenrouter.tasks.benchmark.run", "tokenrouter.tasks.tradeoff.run")


class JobFailed(Exception):
    """A job of a search failed; its error is in its status.json. It crosses processes, whatever the error was."""


def check_extras(arguments: Sequence[str]) -> None:
    """Refuse a launcher or a search whose plugin is not installed.

    Args:
        arguments: of the command line.

    Raises:
        SystemExit: with the extra to install.
    """
    for argument in arguments:
        for beginning, (plugin, extra) in EXTRAS.items():
            is_asked = argument.lstrip("+").startswith(beginning) and not argument.endswith("=null")
            if is_asked and not _is_installed(f"hydra_plugins.{plugin}"):
                raise SystemExit(
                    f"{argument} needs {plugin.replace('_', '-')}, an extra: pip install -e '.[{extra}]'"
                )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def warn_of_neighbours(launcher: DictConfig, task: str) -> None:
    """Says so where jobs that measure times run beside others on one machine.

    Args:
        launcher: ``hydra.launcher``.
        task: target of the job's task.
    """
    kind = str(launcher.get("_target_")).rpartition(".")[2]
    is_shared = (kind == "JoblibLauncher" and launcher.n_jobs != 1) or kind == "LocalLauncher"
    if is_shared and task in TIMED_TASKS:
        log.warning(
            "jobs of this sweep run side by side on one machine, and take time from each other: its throughput, "
            "latency and router.overhead_frac are no measurement. Quality is not affected (task=evaluate)"
        )


class SweepReport(Callback):
    """``hydra.callbacks.sweep_report``: says at a sweep's end what became of its jobs, and writes sweep.json.

    A job that failed raises nothing in a sweep, so that the others run; here it becomes the exit code.
    """

    def __init__(self) -> None:
        self._folder = Path()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Remember the sweep's folder, and report even where the sweep ends with an error."""
        self._folder = Path(config.hydra.sweep.dir)
        atexit.register(self.report)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Report; raises SystemExit (1) where a job failed."""
        atexit.unregister(self.report)
        if not self.report():
            raise SystemExit(1)

    def report(self) -> bool:
        """Write sweep.json and log what became of the jobs; whether all ended well, or had done so before."""
        jobs = [_job(self._folder, path) for path in run_folders(self._folder)]
        if not jobs:
            return True  # an error before the first job, which Hydra has shown
        text = json.dumps({"jobs": jobs}, indent=2, ensure_ascii=False) + "\n"
        replace_file(self._folder / "sweep.json", text.encode())
        failed = [job for job in jobs if job["status"] not in ("ok", "skipped")]
        counts = Counter(job["status"] for job in jobs)
        shown = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        log.info(
            "%s of the sweep: %s; results in %s", counted(len(jobs), "job"), shown, self._folder
        )
        for job in failed:
            error = " ".join(str(job.get("error", "it did not end")).split())
            log.error("job %s (%s) %s: %s", job["folder"], job["job"], job["status"], error)
        if failed and len(failed) == len(jobs):
            log.error("all %s of the sweep failed", counted(len(jobs), "job"))
        sys.stdout.flush()
        return not failed


def _job(sweep_dir: Path, path: Path) -> dict[str, Any]:
    """What sweep.json says of one job."""
    status = read_status(path)
    kept = ("job", "status", "error", "finished_in", "config_hash", "duration_s")
    found = {key: status[key] for key in kept if key in status}
    return {"folder": str(path.relative_to(sweep_dir)), "job": "?", "status": "unreadable"} | found
