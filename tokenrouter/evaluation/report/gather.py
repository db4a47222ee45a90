"""Finds run folders, reads those that numbers may be taken from, and says why not of the others."""

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenrouter.evaluation.paper import Run, read_run
from tokenrouter.evaluation.rows import SystemRow
from tokenrouter.telemetry.runfolder import STATUS

MOST_NAMED = 5
"""Of the folders in the message that none could be read."""
PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedRun:
    """A run that is shown.

    Attributes:
        number: from 1, in the order given.
        run: what its folder says.
        rows: its systems, baselines first; empty where the task compares none.
        figures: of its PNG files: name and content, None where that is no picture.
    """

    number: int
    run: Run
    rows: Sequence[SystemRow]
    figures: Sequence[tuple[str, bytes | None]]

    @property
    def name(self) -> str:
        """The job's name: what the user typed."""
        return str(self.run.status.get("job", "run"))


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A folder that no number is taken from, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """All that was asked for: at least one run."""

    runs: Sequence[ReportedRun]
    left_out: Sequence[LeftOut]


def find_runs(given: Iterable[str], *, skip: Path) -> list[Path]:
    """Run folders, each once, in the order given.

    Args:
        given: folders of a run, folders with runs at any depth, or patterns (``*``, ``?``, ``[0-9]``, ``**``).
        skip: a run folder that does not count: the report's own.

    Returns:
        Every run folder found, and folders without any, which ``gather`` then gives the reason of.

    Raises:
        ValueError: nothing is there.
    """
    found: dict[Path, Path] = {}
    for each in given:
        matches = [each] if os.path.exists(each) else sorted(glob.glob(each, recursive=True))
        folders = [Path(match) for match in matches if os.path.isdir(match)]
        if not folders:
            raise ValueError(
                f"report.runs: {each} is no folder, and no pattern that any folder fits; give folders of runs "
                "(outputs/runs/<date>/<time>) or of sweeps (outputs/sweeps/<date>/<time>)"
            )
        for folder in folders:
            for path in list(_runs_below(folder)) or [folder]:
                found.setdefault(path.resolve(), path)
    return [path for real, path in found.items() if real != skip.resolve()]


def gather(folders: Iterable[Path]) -> Gathered:
    """Reads every folder; a job that was skipped is the run that it names, and that run is shown once.

    Raises:
        ValueError: none that could be read.
    """
    runs: list[ReportedRun] = []
    left_out: list[LeftOut] = []
    for folder in folders:
        try:
            run = read_run(folder)
        except ValueError as error:
            left_out.append(LeftOut(path=folder, reason=_reason(folder, error)))
            continue
        if any(each.run.path.resolve() == run.path.resolve() for each in runs):
            continue
        rows = [SystemRow.from_dict(row) for row in run.systems.values()]
        figures = list(_figures(run.path))
        runs.append(ReportedRun(number=len(runs) + 1, run=run, rows=rows, figures=figures))
    if not runs:
        reasons = "; ".join(f"{each.path} {each.reason}" for each in left_out[:MOST_NAMED])
        more = f"; and {len(left_out) - MOST_NAMED} more" if len(left_out) > MOST_NAMED else ""
        raise ValueError(f"report.runs holds no run to report on: {reasons or 'no folder'}{more}")
    return Gathered(runs=runs, left_out=left_out)


def _runs_below(folder: Path) -> Iterator[Path]:
    """Run folders in a folder or that folder itself, behind links too; nothing within a run is looked at."""
    seen: set[str] = set()
    for at, folders, files in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(at)) in seen:  # a link back
            folders.clear()
            continue
        seen.add(real)
        folders.sort(key=_natural)
        if STATUS in files:
            folders.clear()
            yield Path(at)


def _natural(name: str) -> tuple[int, str]:
    """Jobs of a sweep in the order of their numbers: 9 before 10."""
    return (int(name) if name.isdecimal() else -1, name)


def _reason(folder: Path, error: ValueError) -> str:
    return " ".join(str(error).split()).removeprefix(str(folder)).lstrip(":/ ")


def _figures(folder: Path) -> Iterator[tuple[str, bytes | None]]:
    for path in sorted(folder.glob("*.png")):
        try:
            content = path.read_bytes()
        except OSError:
            content = b""
        yield path.name, content if content.startswith(PNG) else None
