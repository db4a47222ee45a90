"""Reading what a run left behind, and refusing what no number should be taken from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenrouter.telemetry.runfolder import SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A finished run.

    Attributes:
        path: its folder.
        overrides: what the user typed.
        metrics: metrics.json, nested.
        systems: rows of systems.json by system, baselines first; empty where the task compares none.
        chosen: the system that the run is about; None where there are no systems.
        notes: below the table of systems.
        provenance: where and on what it ran.
        status: status.json, ``ok``.
    """

    path: Path
    overrides: Sequence[str]
    metrics: Mapping[str, Any]
    systems: Mapping[str, Mapping[str, Any]]
    chosen: str | None
    notes: Sequence[str]
    provenance: Mapping[str, Any]
    status: Mapping[str, Any]

    @property
    def finished_at(self) -> str:
        """ISO 8601; empty where the run does not say."""
        return str(self.status.get("finished_at", ""))

    @property
    def model_hash(self) -> str | None:
        """Of the weights that were loaded; None where the task loads none."""
        return self.provenance.get("model_hash")


def read_run(path: Path | str) -> Run:
    """Reads a run folder.

    Args:
        path: the folder; of a sweep's job that was skipped, the run that it names is read.

    Raises:
        ValueError: no run, one that has not ended or has failed, files of another schema version, or damaged ones.
    """
    folder = Path(path)
    status = _read(folder, "status.json", missing="is no run folder")
    state = status.get("status")
    if state == "running":
        raise ValueError(
            f"{folder}: the run has not ended, or it was killed: run it again, or leave it out"
        )
    if state == "skipped":
        return read_run(_finished_in(folder, status))
    if state != "ok":
        raise ValueError(
            f"{folder}: the run failed ({status.get('error', 'no reason is given')}): run it again, or leave it out"
        )
    if (version := status.get("schema_version")) != SCHEMA_VERSION:
        raise ValueError(
            f"{folder}: its files have schema version {version}, and this code reads {SCHEMA_VERSION}: run it again"
        )
    metrics = _read(folder, "metrics.json", missing="has measured nothing")
    rows, notes = _read_systems(folder)
    return Run(
        path=folder,
        overrides=_read_overrides(folder),
        metrics=metrics,
        systems={row["name"]: row for row in rows},
        chosen=next((row["name"] for row in rows if row.get("chosen")), None),
        notes=notes,
        provenance=_read_provenance(folder),
        status=status,
    )


def is_finished(path: Path | str) -> bool:
    """Whether a folder holds a run that ended well and that this code reads."""
    try:
        status = _read(Path(path), "status.json", missing="")
    except ValueError:
        return False
    return status.get("status") == "ok" and status.get("schema_version") == SCHEMA_VERSION


def _finished_in(folder: Path, status: Mapping[str, Any]) -> Path:
    """The run that has a skipped job's numbers."""
    target = status.get("finished_in")
    if not isinstance(target, str):
        raise ValueError(f"{folder}: it was skipped, and does not say for which run: run it again")
    found = _read(Path(target), "status.json", missing="is no run folder")
    if found.get("status") == "skipped":
        raise ValueError(f"{folder}: it was skipped for {target}, which was skipped: run it again")
    return Path(target)


def _read_systems(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows and notes of systems.json; nothing where the task compares no systems."""
    if not (folder / "systems.json").exists():
        return [], []
    found = _read(folder, "systems.json", missing="")
    rows, notes = found.get("rows", []), found.get("notes", [])
    if not isinstance(rows, list) or not all(map(_is_row, rows)) or not isinstance(notes, list):
        raise ValueError(f"{folder / 'systems.json'} holds no rows of systems: run it again")
    return rows, [str(note) for note in notes]


def _is_row(row: Any) -> bool:
    """A system's name with its numbers, those of passes with their spread."""
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        return False
    spreads = [value for value in row.values() if isinstance(value, dict)]
    numbers = [value.get(key) for value in spreads for key in ("median", "min", "max")]
    return all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers)


def _read_provenance(folder: Path) -> dict[str, Any]:
    provenance = _read(folder, "provenance.json", missing="does not say where it ran")
    if not isinstance(provenance.get("hardware", {}), dict):
        raise ValueError(f"{folder / 'provenance.json'} names no hardware: run it again")
    return provenance


def _read_overrides(folder: Path) -> list[str]:
    try:
        lines = (folder / "overrides.yaml").read_text().splitlines()
        return [json.loads(line.removeprefix("- ")) for line in lines if line.startswith("- ")]
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder}: overrides.yaml cannot be read ({error}): run it again"
        ) from None


def _read(folder: Path, name: str, *, missing: str) -> dict[str, Any]:
    path = folder / name
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder} {missing}: there is no {name}") from None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): the run was cut short; run it again"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no object: run it again")
    return value
