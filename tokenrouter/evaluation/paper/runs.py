"""Reading what a run left behind, and refusing what no number should be taken from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenrouter.evaluation.rows import SystemRow
from tokenrouter.telemetry.runfolder import SCHEMA_VERSION, STATUS

MACHINE = ("cpu", "devices", "num_cpus")
"""What tells machines apart, of provenance.json's hardware."""


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
        provenance: where and on what it ran; it has ``hardware``.
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

    @property
    def machine(self) -> tuple[Any, ...]:
        """``MACHINE`` of its hardware."""
        return tuple(self.provenance["hardware"].get(key) for key in MACHINE)

    @property
    def num_threads(self) -> int | None:
        """Torch's; None where the run does not say."""
        return self.provenance.get("num_threads")


def read_run(path: Path | str) -> Run:
    """Reads a run folder.

    Args:
        path: the folder; of a sweep's job that was skipped, the run that it names is read.

    Raises:
        ValueError: no run, one that has not ended or has failed, files of another schema version, or damaged ones.
    """
    folder = Path(path)
    status = _read(folder, STATUS, missing="is no run folder")
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


def _finished_in(folder: Path, status: Mapping[str, Any]) -> Path:
    """The run that has a skipped job's numbers."""
    target = status.get("finished_in")
    if not isinstance(target, str):
        raise ValueError(f"{folder}: it was skipped, and does not say for which run: run it again")
    found = _read(Path(target), STATUS, missing="is no run folder")
    if found.get("status") == "skipped":
        raise ValueError(f"{folder}: it was skipped for {target}, which was skipped: run it again")
    return Path(target)


def _read_systems(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows and notes of systems.json; nothing where the task compares no systems."""
    path = folder / "systems.json"
    if not path.exists():
        return [], []
    found = _read(folder, path.name, missing="")
    rows, notes = found.get("rows", []), found.get("notes", [])
    if not isinstance(rows, list) or not isinstance(notes, list):
        raise ValueError(f"{path} holds no rows of systems: run it again")
    try:
        names = [SystemRow.from_dict(row).name for row in rows]
    except ValueError as error:
        raise ValueError(f"{path}: {error}: run it again") from None
    if len(set(names)) < len(names):
        raise ValueError(f"{path} names a system twice: run it again")
    return rows, [str(note) for note in notes]


def _read_provenance(folder: Path) -> dict[str, Any]:
    provenance = _read(folder, "provenance.json", missing="does not say where it ran")
    hardware = provenance.get("hardware")
    if not isinstance(hardware, dict) or not hardware:
        raise ValueError(f"{folder / 'provenance.json'} names no hardware: run it again")
    return provenance


def _read_overrides(folder: Path) -> list[str]:
    path = folder / "overrides.yaml"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        found = [] if lines == ["[]"] else [json.loads(line.removeprefix("- ")) for line in lines]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): run it again") from None
    if not lines or not all(isinstance(each, str) for each in found):
        raise ValueError(f"{path} holds no list of overrides: run it again")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _read(folder: Path, name: str, *, missing: str) -> dict[str, Any]:
    path = folder / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except FileNotFoundError:
        raise ValueError(f"{folder} {missing}: there is no {name}") from None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): the run was cut short; run it again"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no object: run it again")
    return value
