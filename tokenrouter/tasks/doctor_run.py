"""A finished run as its folder tells it, and what a rule about it is."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tokenrouter.telemetry.runfolder import leaves

Level = Literal["serious", "warning", "note"]
LEVELS: tuple[Level, ...] = ("serious", "warning", "note")


COMPARISON = ("provenance.json", "metrics.json", "table.md", "systems.json")
WRITES: Mapping[str, tuple[str, ...]] = {
    "tradeoff": (*COMPARISON, "steps.jsonl"),
    "benchmark": (*COMPARISON, "steps.jsonl"),
    "evaluate": COMPARISON,
    "bisect": ("provenance.json", "metrics.json", "bisect.md", "bisect.json", "steps.jsonl"),
    "generate": ("provenance.json", "metrics.json", "completion.txt"),
    "explain": ("provenance.json", "explain.html", "explain.png", "explained.json"),
    "calibrate": ("provenance.json", "calibrated.json"),
    "collect": ("provenance.json", "collected.json"),
    "collect_oracle": ("provenance.json", "collected.json"),
    "collect_retention": ("provenance.json", "collected.json"),
    "train_router": ("provenance.json", "trained.json"),
    "train_retention": ("provenance.json", "trained.json"),
    "doctor": ("doctor.json",),
    "report": ("report.html", "report.json"),
}
"""By task, what every run of it that ends well leaves beside config.yaml and status.json."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    """The files of a run folder; what a task does not write, or did not come to write, is empty.

    Attributes:
        path: the folder.
        status: status.json.
        config: config.yaml, resolved.
        metrics: metrics.json.
        provenance: provenance.json.
        steps: the rows of steps.jsonl.
        damaged: for each file that cannot be read as a whole, or holds what no run writes: what is wrong. What could be
            read of it is above.
    """

    path: Path
    status: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[Mapping[str, Any], ...] = ()
    damaged: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """Files that a run of this task leaves when it ends well, and that are not there."""
        target = str(self.option("task._target_") or "")
        task = target.removeprefix("tokenrouter.tasks.").removesuffix(".run")
        written = ("config.yaml", *WRITES.get(task, ("provenance.json", "metrics.json")))
        return tuple(name for name in written if not (self.path / name).exists())

    def number(self, path: str) -> float | None:
        """The finite number at a dotted path of metrics.json; None where there is none."""
        value = _at(self.metrics, path)
        return float(value) if _is_finite(value) else None

    def option(self, path: str) -> Any:
        """The value at a dotted path of config.yaml; None where there is none."""
        return _at(self.config, path)


class Seen(NamedTuple):
    """That a rule applies to a run: how bad it is, and the numbers that say so."""

    level: Level
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One usual trouble. ``when``, ``why`` and ``cure`` are the row of docs/troubleshooting.md.

    Attributes:
        name: in lower case, with underscores.
        when: what must be seen for the rule to apply.
        why: it matters.
        cure: what to do, overrides in backticks.
        check: what was seen in a run; None where the rule does not apply or the run does not tell.
    """

    name: str
    when: str
    why: str
    cure: str
    check: Callable[[FinishedRun], Seen | None]


def read_run(path: Path) -> FinishedRun:
    """Read a run folder.

    Args:
        path: what ``RunFolder`` wrote.

    Raises:
        ValueError: no folder, or no run in it.
    """
    if not path.is_dir():
        raise ValueError(f"run={path}: no such folder; give a run folder, {_WHERE}")
    if not (path / "status.json").exists():
        inside = sorted(p.parent.name for p in path.glob("*/status.json"))
        hint = (
            f"it holds {len(inside)} of them; name one, e.g. run={path / inside[-1]}"
            if inside
            else f"it has no status.json; give a run folder, {_WHERE}"
        )
        raise ValueError(f"run={path} is no run: {hint}")
    damaged: list[str] = []
    status = _json(path / "status.json", damaged)
    if status.get("status") == "skipped":
        raise ValueError(
            f"run={path} was skipped, as it had run before: give run={status.get('finished_in')}"
        )
    metrics = _json(path / "metrics.json", damaged)
    wrong = [
        key for key, value in leaves(metrics) if isinstance(value, float) and not _is_finite(value)
    ]
    if wrong:
        damaged.append(f"metrics.json has no finite number at {', '.join(wrong)}")
    return FinishedRun(
        path=path,
        status=status,
        config=_config(path / "config.yaml", damaged),
        metrics=metrics,
        provenance=_json(path / "provenance.json", damaged),
        steps=_steps(path / "steps.jsonl", damaged),
        damaged=tuple(damaged),
    )


_WHERE = "outputs/runs/<date>/<time> or outputs/sweeps/<date>/<time>/<job>"


def _at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _json(path: Path, damaged: list[str]) -> dict[str, Any]:
    """The object in a file; empty where there is none, with a line in ``damaged`` where there is something else."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        damaged.append(f"{path.name} cannot be read as JSON ({error})")
        return {}
    if not isinstance(value, dict):
        damaged.append(f"{path.name} must hold a JSON object, and holds {type(value).__name__}")
        return {}
    return value


def _steps(path: Path, damaged: list[str]) -> tuple[dict[str, Any], ...]:
    """The rows that can be read."""
    if not path.exists():
        return ()
    rows: list[dict[str, Any]] = []
    bad: list[int] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            bad.append(number)
    if bad:
        damaged.append(
            f"{path.name}: {len(bad)} of {len(bad) + len(rows)} lines are no JSON objects, the first is line {bad[0]}"
        )
    return tuple(rows)


def _config(path: Path, damaged: list[str]) -> dict[str, Any]:
    """The options, as ``_json`` reads an object."""
    if not path.exists():
        return {}
    try:
        config: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        damaged.append(f"{path.name} cannot be read as YAML ({' '.join(str(error).split())})")
        return {}
    if not isinstance(config, dict) or not config:
        damaged.append(f"{path.name} must hold options, and holds {config or 'nothing'!r}")
        return {}
    return config
