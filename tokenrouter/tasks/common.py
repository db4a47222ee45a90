"""The life of a job: run folder, tracker, task, status; and errors that a user can read."""

import logging
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tokenrouter.kernels import NativeUnavailable
from tokenrouter.tasks import checks
from tokenrouter.tasks.finished import (
    config_hash,
    find_finished,
    other_commit,
    put_aside,
    read_objective,
)
from tokenrouter.tasks.sweeps import JobFailed, warn_of_neighbours
from tokenrouter.tasks.tracking import NoTracker, TrackedRun, run_name
from tokenrouter.telemetry import RunFolder, reset_peak_process_bytes

log = logging.getLogger(__name__)
UNTRACKED_TASKS = ("tokenrouter.tasks.doctor.run", "tokenrouter.tasks.report.run")
"""They measure nothing."""
USER_ERRORS = (ValueError, FileNotFoundError, OmegaConfBaseException, NativeUnavailable)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a task gets: the config, the folder to write to, the tracker to copy to."""

    cfg: DictConfig
    folder: RunFolder
    run: TrackedRun

    def finish(
        self,
        metrics: Mapping[str, Any],
        plots: Sequence[Path] = (),
        tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    ) -> None:
        """Write metrics.json and hand metrics, plots and tables (rows by name) to the tracker."""
        self.folder.write_metrics(metrics)
        self.run.log_metrics(metrics)
        if plots:
            self.run.log_images(plots)
        for name, rows in (tables or {}).items():
            self.run.log_table(name, rows)


def run_job(cfg: DictConfig) -> Any:
    """Run the task of one Hydra job.

    Every failure is in status.json; a user's mistake, and Ctrl-C, is one line on the terminal. In a sweep a failing job
    spares the others: ``sweeps.SweepReport`` turns it into the exit code.

    Returns:
        What ``objective`` names, for a search; None without one, and of a job of a plain sweep that failed.

    Raises:
        SystemExit: a user's mistake in a single run (1); Ctrl-C (130), which ends a sweep too.
        JobFailed: any failure in a search, so that it is no trial.
        Exception: any other failure of a single run.
    """
    logging.captureWarnings(True)
    warnings.formatwarning = lambda message, *_, **__: str(message)
    hydra_cfg = HydraConfig.get()
    sweep = hydra_cfg.mode == RunMode.MULTIRUN
    overrides = list(hydra_cfg.overrides.task)
    folder = Path(hydra_cfg.runtime.output_dir)
    try:
        if sweep:
            warn_of_neighbours(hydra_cfg.launcher, cfg.task._target_)
            if done := _done_before(cfg, folder, Path(hydra_cfg.sweep.dir)):
                return _skip(cfg, done, folder, overrides)
            put_aside(folder)
        with open_job(cfg, folder, overrides, group=folder.parent.name if sweep else None) as job:
            instantiate(cfg.task)(job)
            objective = read_objective(cfg, folder)
    except KeyboardInterrupt:
        log.error("interrupted by the user; what was written lies in %s", folder)
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:
        cause = _logged_cause(error, folder, sweep=sweep)
        if not sweep and _is_users(cause):
            raise SystemExit(1) from None
        if not sweep:
            raise
        if cfg.objective is not None:
            raise JobFailed(str(cause)) from None
        return None
    log.info("results in %s", folder)
    return objective


def _logged_cause(error: Exception, folder: Path, *, sweep: bool) -> BaseException:
    cause = root_cause(error)
    log.error(
        "failed: %s (traceback in %s)",
        " ".join(str(cause).split()),
        folder / "status.json",
        exc_info=sweep and not _is_users(cause),  # Hydra prints a single run's itself
    )
    return cause


def _done_before(cfg: DictConfig, folder: Path, sweep_dir: Path) -> Path | None:
    """The run folder of a job that ended well and computed the same."""
    is_asked = cfg.skip_finished is True and cfg.task._target_ not in UNTRACKED_TASKS
    if not is_asked or (wanted := _hash(cfg)) is None:
        return None
    return find_finished(wanted, folder, sweep_dir, Path(cfg.paths.output_dir))


def _skip(cfg: DictConfig, done: Path, folder: Path, overrides: Sequence[str]) -> Any:
    """What ``done`` gives a search; that this job is not run stands in the log and in its folder."""
    log.info(
        "skipped: the same configuration ended well in %s%s; skip_finished=false runs it again",
        done,
        other_commit(done),
    )
    if done == folder:
        return read_objective(cfg, done)
    put_aside(folder)
    skipped = RunFolder(folder, job=_name(overrides), facts=_facts(cfg))
    with _failure_recorded(skipped):
        objective = read_objective(cfg, done)
    skipped.skip(done)
    return objective


def _facts(cfg: DictConfig) -> dict[str, str]:
    config_id = _hash(cfg)
    return {"config_hash": config_id} if config_id else {}


def _hash(cfg: DictConfig) -> str | None:
    """Of a config that resolves; of another, ``open_job`` says what is wrong."""
    try:
        return config_hash(cfg)
    except OmegaConfBaseException:
        return None


def _name(overrides: Sequence[str]) -> str:
    return " ".join(overrides) or "defaults"


@contextmanager
def open_job(
    cfg: DictConfig, path: Path, overrides: Sequence[str], *, group: str | None = None
) -> Iterator[Job]:
    """A job's folder and tracker run, both closed with the right status whatever happens.

    Args:
        cfg: the composed config; it must resolve.
        path: the run folder.
        overrides: what the user typed; it names the job.
        group: the sweep that the job belongs to.

    Raises:
        ValueError: the config shows a mistake by itself; nothing is loaded then.
    """
    name = _name(overrides)
    folder = RunFolder(path, job=name, facts=_facts(cfg))
    with _failure_recorded(folder):
        checks.check_config(cfg)
        config: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        folder.write_config(OmegaConf.to_yaml(cfg, resolve=True), overrides)
        _prepare_process(cfg)
        is_tracked = cfg.task._target_ not in UNTRACKED_TASKS
        tracker = instantiate(cfg.logger) if is_tracked else NoTracker()
        with tracker.open(
            path, config=config, name=run_name(name), group=group, job_type=task_name(cfg)
        ) as run:
            with _failure_recorded(folder):
                yield Job(cfg=cfg, folder=folder, run=run)
            folder.succeed()  # before the tracker closes, which takes the folder as it is


@contextmanager
def _failure_recorded(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        folder.fail(error, root_cause(error))
        raise


def task_name(cfg: DictConfig) -> str:
    """As its file in conf/task is called, such as ``evaluate``."""
    return str(cfg.task._target_).split(".")[-2]


def root_cause(error: BaseException) -> BaseException:
    """The error itself, not Hydra's wrapping of it."""
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _is_users(error: BaseException) -> bool:
    return isinstance(error, USER_ERRORS)


def _prepare_process(cfg: DictConfig) -> None:
    torch.manual_seed(cfg.seed)
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    reset_peak_process_bytes()
    import transformers

    transformers.utils.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()


def quote_prompt(arguments: Sequence[str]) -> list[str]:
    """Arguments with the value of ``prompt=`` quoted, so that commas and brackets stay text."""
    return [_quoted(argument) for argument in arguments]


def _quoted(argument: str) -> str:
    found = re.fullmatch(r"(\+{0,2}prompt)=(.*)", argument, flags=re.DOTALL)
    if found is None or re.fullmatch(r"'.*'|\".*\"", found[2], flags=re.DOTALL):
        return argument
    escaped = re.sub(r"(\\*)'", lambda m: m[1] * 2 + r"\'", found[2])
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"{found[1]}='{escaped}{chr(92) * trailing}'"
