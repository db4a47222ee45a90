"""Experiment trackers. One tracker run per job, owned by the job: opened, filled and closed here.

The run folder is the source of truth; a tracker gets a copy.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenrouter.telemetry.runfolder import leaves

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
    """A W&B run."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log_metrics(self, metrics: Mapping[str, Any]) -> None:
        """See TrackedRun."""
        self._run.log(
            {path.replace(".", "/"): value for path, value in leaves(metrics) if value is not None}
        )

    def log_images(self, paths: Sequence[Path]) -> None:
        """See TrackedRun."""
        import wandb

        self._run.log({path.stem: wandb.Image(str(path)) for path in paths})


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
        """A new run below ``folder``, never an earlier job's; failed when the job failed."""
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
        try:
            yield WandbRun(run)
        except BaseException:
            run.finish(exit_code=1)
            raise
        run.finish(exit_code=0)
