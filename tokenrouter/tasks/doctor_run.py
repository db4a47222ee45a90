"""A finished run as its folder tells it, and what a rule about it is."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from omegaconf import OmegaConf

Level = Literal["serious", "warning", "note"]
LEVELS: tuple[Level, ...] = ("serious", "warning", "note")


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
    """

    path: Path
    status: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[Mapping[str, Any], ...] = ()

    def number(self, path: str) -> float | None:
        """The number at a dotted path of metrics.json; None where there is none."""
        value = _at(self.metrics, path)
        return float(value) if isinstance(value, int | float) else None

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
        ValueError: no folder, no run in it, or a file in it that cannot be read.
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
    return FinishedRun(
        path=path,
        status=_json(path / "status.json"),
        config=_config(path / "config.yaml"),
        metrics=_json(path / "metrics.json"),
        provenance=_json(path / "provenance.json"),
        steps=_steps(path / "steps.jsonl"),
    )


_WHERE = "outputs/runs/<date>/<time> or outputs/sweeps/<date>/<time>/<job>"


def _at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}): repeat the run") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _steps(path: Path) -> tuple[dict[str, Any], ...]:
    if not path.exists():
        return ()
    try:
        return tuple(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read as JSON lines ({error}): repeat the run"
        ) from error


def _config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    config: Any = OmegaConf.to_container(OmegaConf.load(path))
    return dict(config)
