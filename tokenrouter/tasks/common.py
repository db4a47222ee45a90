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

    def finish(self, metrics: Mapping[str, Any], plots: Sequence[Path] = ()) -> None:
        """Write metrics.json and hand metrics and plots to the tracker."""
        self.folder.write_metrics(metrics)
        self.run.log_metrics(metrics)
        if plots:
            self.run.log_images(plots)


def run_job(cfg: DictConfig) -> None:
    """Run the task of one Hydra job.

    Every failure is in status.json; a user's mistake, and Ctrl-C, is one line on the terminal.

    Raises:
        SystemExit: a user's mistake in a single run (1); Ctrl-C (130), which ends a sweep too.
        Exception: any other failure, and every failure in a sweep, so that Hydra counts it.
    """
    logging.captureWarnings(True)
    warnings.formatwarning = lambda message, *_, **__: str(message)
    hydra_cfg = HydraConfig.get()
    sweep = hydra_cfg.mode == RunMode.MULTIRUN
    overrides = list(hydra_cfg.overrides.task)
    folder = Path(hydra_cfg.runtime.output_dir)
    try:
        with open_job(cfg, folder, overrides, group=folder.parent.name if sweep else None) as job:
            instantiate(cfg.task)(job)
    except KeyboardInterrupt:
        log.error("interrupted by the user; what was written lies in %s", folder)
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:
        cause = root_cause(error)
        log.error(
            "failed: %s (traceback in %s)",
            " ".join(str(cause).split()),
            folder / "status.json",
            exc_info=sweep and not _is_users(cause),  # Hydra prints a single run's itself
        )
        if _is_users(cause) and not sweep:
            raise SystemExit(1) from None
        raise
    log.info("results in %s", folder)


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
    name = " ".join(overrides) or "defaults"
    folder = RunFolder(path, job=name)
    try:
        checks.check_config(cfg)
        config: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        folder.write_config(OmegaConf.to_yaml(cfg, resolve=True), overrides)
        _prepare_process(cfg)
        is_tracked = cfg.task._target_ not in UNTRACKED_TASKS
        tracker = instantiate(cfg.logger) if is_tracked else NoTracker()
        with tracker.open(path, config=config, name=run_name(name), group=group) as run:
            yield Job(cfg=cfg, folder=folder, run=run)
    except BaseException as error:
        folder.fail(error)
        raise
    folder.succeed()


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
