"""Experiment trackers. One tracker run per job, owned by the job: opened, filled and closed here.

The run folder is the source of truth; a tracker gets a copy.
"""

import hashlib
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenrouter.checks import check_flag
from tokenrouter.telemetry.runfolder import leaves

log = logging.getLogger(__name__)
MAX_NAME = 96
MAX_STEPS = 1000
STEP_AXIS = "steps/step"
NOT_IN_ARTIFACT = ("wandb", "earlier-")


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

    @abstractmethod
    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Attach a table; nested keys are joined with slashes."""

    @abstractmethod
    def log_steps(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record numbers per engine step, each row with its ``step``."""


class NoRun(TrackedRun):
    """Records nothing."""

    def log_metrics(self, metrics: Mapping[str, Any]) -> None:
        """See TrackedRun."""

    def log_images(self, paths: Sequence[Path]) -> None:
        """See TrackedRun."""

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """See TrackedRun."""

    def log_steps(self, rows: Sequence[Mapping[str, Any]]) -> None:
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

    def define_steps(self) -> None:
        """Numbers per engine step are drawn over the step, and are no result; trainings have Lightning's axis."""

        def send() -> None:
            self._run.define_metric(STEP_AXIS, summary="none")
            self._run.define_metric("steps/*", step_metric=STEP_AXIS, summary="none")

        self._try("the axis of engine steps", send)

    def log_metrics(self, metrics: Mapping[str, Any]) -> None:
        """See TrackedRun; they are the run's summary, too, by which W&B compares and sweeps."""
        values = _slashed(metrics)

        def send() -> None:
            self._run.log(values)
            self._run.summary.update(values)

        self._try("the metrics", send)

    def log_images(self, paths: Sequence[Path]) -> None:
        """See TrackedRun."""
        import wandb

        self._try(
            f"the plots {', '.join(path.name for path in paths)}",
            lambda: self._run.log({path.stem: wandb.Image(str(path)) for path in paths}),
        )

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """See TrackedRun."""
        import wandb

        flat = [_slashed(row) for row in rows]
        columns: list[str | int] = list(dict.fromkeys(key for row in flat for key in row))
        data = [[row.get(str(column)) for column in columns] for row in flat]
        self._try(
            f"the table {name}",
            lambda: self._run.log(
                {name: wandb.Table(columns=columns, data=data, allow_mixed_types=True)}
            ),
        )

    def log_steps(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """See TrackedRun; at most ``MAX_STEPS`` rows, evenly spaced: all of them are in the run folder."""

        def send() -> None:
            for row in rows[:: max(1, math.ceil(len(rows) / MAX_STEPS))]:
                self._run.log({f"steps/{key}": value for key, value in row.items()})

        self._try("the engine's steps", send)

    def log_folder(self) -> None:
        """The run folder as an artifact, without W&B's own files.

        Files stay where they are until they are uploaded; the log, which goes on, is copied.
        """
        import wandb

        def send() -> None:
            artifact = wandb.Artifact(f"run-{self._run.id}", type="run")
            for path in sorted(self._folder.rglob("*")):
                name = path.relative_to(self._folder)
                if path.is_file() and not name.parts[0].startswith(NOT_IN_ARTIFACT):
                    policy: Any = "mutable" if path.suffix == ".log" else "immutable"
                    artifact.add_file(str(path), name=str(name), policy=policy)
            self._run.log_artifact(artifact)

        self._try("the run folder as an artifact", send)

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


def _slashed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by their path, with slashes; those without a value are left out."""
    return {path.replace(".", "/"): value for path, value in leaves(tree) if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class NoTracker:
    """``logger=none``."""

    @contextmanager
    def open(
        self,
        folder: Path,
        *,
        config: Mapping[str, Any],
        name: str,
        group: str | None,
        job_type: str,
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
        group: W&B group of the run; None: the sweep that it belongs to.
        artifact: whether the run folder goes to W&B as an artifact.
    """

    project: str
    mode: Literal["offline", "online", "disabled"] = "offline"
    entity: str | None = None
    tags: Sequence[str] = ()
    group: str | None = None
    artifact: bool = True

    def __post_init__(self) -> None:
        if self.mode not in ("offline", "online", "disabled"):
            raise ValueError(f"logger.mode={self.mode!r} must be offline, online or disabled")
        check_flag("logger.artifact", self.artifact)

    @contextmanager
    def open(
        self,
        folder: Path,
        *,
        config: Mapping[str, Any],
        name: str,
        group: str | None,
        job_type: str,
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
            group=group if self.group is None else self.group,
            job_type=job_type,
            tags=list(self.tags),
            reinit="create_new",
            settings=settings,
        )
        tracked = WandbRun(run, folder)
        tracked.define_steps()
        exit_code = 1
        try:
            yield tracked
            exit_code = 0
        finally:
            if self.artifact:
                tracked.log_folder()
            tracked.finish(exit_code)
