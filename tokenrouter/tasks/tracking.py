"""Experiment trackers. One tracker run per job, owned by the job: opened, filled and closed here.

The run folder is the source of truth; a tracker gets a copy.
"""

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenrouter.telemetry.runfolder import leaves

log = logging.getLogger(__name__)
MAX_NAME = 96


def run_name(job: str) -> str:
    """A job's name on one line of at most ``MAX_NAME`` characters.

    What is cut off is replaced by a short hash of the whole name, so that jobs that differ at the
    end keep different names.
    """
    line = " ".join(job.split())
    if len(line) <= MAX_NAME:
        return line
    ending = f"... {hashlib.sha256(job.encode()).hexdigest()[:8]}"
    return line[: MAX_NAME - len(ending)] + ending


class TrackedRun(ABC):
    """What a job may do with its tracker run."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Record the final metrics; nested keys are joined with slashes."""

    @abstractmethod
    def log_images(self, paths: Sequence[Path]) -> None:
        """Attach plots."""


class NoRun(TrackedRun):
    """Records nothing."""

    def log_metrics(self, metrics: Mapping[str, Any]) -> None:
        """See TrackedRun."""

    def log_images(self, paths: Sequence[Path]) -> None:
        """See TrackedRun."""


class WandbRun(TrackedRun):
    """A W&B run. What W&B does not take is kept for one warning at the end: it fails no job.

    Args:
        run: of ``wandb.init``.
        folder: the run folder, where the results lie in any case.
    """

    def __init__(self, run: Any, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._lost: list[str] = []
        self._error: Exception | None = None

    @property
    def experiment(self) -> Any:
        """The run of ``wandb.init``, for libraries that log to it themselves."""
        return self._run

    def log_metrics(self, metrics: Mapping[str, Any]) -> None:
        """See TrackedRun."""
        values = {
            path.replace(".", "/"): value for path, value in leaves(metrics) if value is not None
        }
        self._try("the metrics", lambda: self._run.log(values))

    def log_images(self, paths: Sequence[Path]) -> None:
        """See TrackedRun."""
        import wandb

        self._try(
            f"the plots {', '.join(path.name for path in paths)}",
            lambda: self._run.log({path.stem: wandb.Image(str(path)) for path in paths}),
        )

    def finish(self, exit_code: int) -> None:
        """Close the run, and warn of what did not reach it."""
        self._try(f"the run's end (exit code {exit_code})", lambda: self._run.finish(exit_code))
        if self._error is None:
            return
        import wandb

        with suppress(Exception):  # a broken connection would also fail the sweep's next job
            wandb.teardown(exit_code)
        log.warning(
            "W&B did not log %s (%s: %s); everything that was written lies in the run folder %s",
            " and ".join(self._lost),
            type(self._error).__name__,
            self._error,
            self._folder,
        )

    def _try(self, what: str, send: Callable[[], None]) -> None:
        try:
            send()
        except Exception as error:
            self._lost.append(what)
            self._error = self._error or error


@dataclass(frozen=True, kw_only=True, slots=True)
class NoTracker:
    """``logger=none``."""

    @contextmanager
    def open(
        self, folder: Path, *, config: Mapping[str, Any], name: str, group: str | None
    ) -> Iterator[TrackedRun]:
        """A run that records nothing."""
        yield NoRun()


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbTracker:
    """``logger=wandb``: Weights & Biases, offline unless told otherwise: no account, no network.

    Args:
        project: W&B project.
        mode: offline, online or disabled.
        entity: W&B team; None is the account's own.
        tags: W&B tags.
    """

    project: str
    mode: Literal["offline", "online", "disabled"] = "offline"
    entity: str | None = None
    tags: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.mode not in ("offline", "online", "disabled"):
            raise ValueError(f"logger.mode={self.mode!r} must be offline, online or disabled")

    @contextmanager
    def open(
        self, folder: Path, *, config: Mapping[str, Any], name: str, group: str | None
    ) -> Iterator[TrackedRun]:
        """A new run below ``folder``, never an earlier job's; failed when the job failed.

        An error while it starts is raised; a later one is a warning, since the run folder has the results.
        """
        import wandb

        settings = wandb.Settings(
            silent=True, console="off", x_disable_stats=True, disable_git=True
        )
        run = wandb.init(
            project=self.project,
            entity=self.entity,
            mode=self.mode,
            dir=folder,
            config=dict(config),
            name=name,
            group=group,
            tags=list(self.tags),
            reinit="create_new",
            settings=settings,
        )
        tracked = WandbRun(run, folder)
        try:
            yield tracked
        except BaseException:
            tracked.finish(1)
            raise
        tracked.finish(0)
