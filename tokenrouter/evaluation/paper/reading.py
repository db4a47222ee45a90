"""Reads ``table.yaml`` and refuses, before any run, what no table can be made of."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args

import yaml

from .spec import CSV_COLUMNS, Better, Column, Figure, Rows, TableSpec


def read_spec(path: Path) -> TableSpec:
    """Reads ``table.yaml``.

    ``base`` are the overrides of all runs; ``grid`` maps each label to its choices, a list of overrides or a mapping
    from the name shown to one or several of them. A list of grids of the same labels makes the runs of each.

    Args:
        path: the file; its folder names the table.

    Raises:
        ValueError: it is missing, no YAML, or says what no table has.
    """
    try:
        node = yaml.load(path.read_text(encoding="utf-8"), Loader=_Once)
    except FileNotFoundError:
        raise ValueError(f"there is no {path}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {error}") from None
    known = {f.name for f in fields(TableSpec)} - {"name", "runs", "labels"} | {"base", "grid"}
    _check_mapping(path, "", node, known)
    base = _overrides(path, "base", node.pop("base", []))
    labels, runs = _runs(path, node.pop("grid", {}), base)
    columns = node.pop("columns", [])
    if not isinstance(columns, list) or not columns:
        raise ValueError(f"{path}: a table needs columns, a list of them; got {columns!r}")
    figure = node.pop("figure", None)
    fixed = {
        "name": path.parent.name,
        "runs": runs,
        "labels": labels,
        "columns": [_built(path, "columns", Column, each) for each in columns],
        "figure": None if figure is None else _built(path, "figure", Figure, figure),
    }
    spec: TableSpec = _built(path, "", TableSpec, node, fixed)
    _check(path, spec)
    return spec


def _runs(
    path: Path, grids: Any, base: Sequence[str]
) -> tuple[tuple[str, ...], dict[tuple[str, ...], list[str]]]:
    """Labels, and the overrides of every run by its labels."""
    labels: tuple[str, ...] | None = None
    runs: dict[tuple[str, ...], list[str]] = {}
    for grid in grids if isinstance(grids, list) and grids else [grids]:
        own = tuple(map(str, grid)) if isinstance(grid, dict) else None
        if own is None or labels not in (None, own):
            raise ValueError(f"{path}: grid must map labels to choices; grids of a list, the same")
        labels = own
        choices = [_choices(path, label, each).items() for label, each in grid.items()]
        for chosen in itertools.product(*choices):
            names = tuple(name for name, _ in chosen)
            if names in runs:
                raise ValueError(f"{path}: two grids have {', '.join(names)}")
            runs[names] = [*base, *itertools.chain(*(each for _, each in chosen))]
    return labels or (), runs


class _Once(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Refuses a name that a mapping has twice, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if key.value != "<<"]
        if twice := [name for name in dict.fromkeys(map(str, names)) if names.count(name) > 1]:
            raise yaml.constructor.ConstructorError(
                None, None, f"{twice[0]!r} is there twice", node.start_mark
            )
        made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return made


def _choices(path: Path, label: Any, node: Any) -> dict[str, list[str]]:
    """Overrides by the name that is shown: of ``key=value`` the value."""
    if isinstance(node, list):
        names = [str(each).rpartition("=")[2] for each in node]
        if len(set(names)) < len(names):
            raise ValueError(
                f"{path}: two choices of grid.{label} are shown as one; give names: {{name: override}}"
            )
        node = dict(zip(names, node, strict=True))
    if not isinstance(node, dict) or not node:
        raise ValueError(f"{path}: grid.{label} must be a list of overrides, or names with theirs")
    return {
        str(name): _overrides(path, f"grid.{label}.{name}", own if isinstance(own, list) else [own])
        for name, own in node.items()
    }


def _built(
    path: Path, part: str, kind: Any, node: Any, more: Mapping[str, Any] | None = None
) -> Any:
    """A ``kind`` of the values of ``node`` and ``more``."""
    more = more or {}
    _check_mapping(path, part, node, {f.name for f in fields(kind)} - set(more))
    missing = [
        f.name
        for f in fields(kind)
        if f.default is f.default_factory is MISSING and f.name not in (*node, *more)
    ]
    if missing:
        raise ValueError(f"{path}: {part or 'the table'} needs {', '.join(missing)}")
    for name, value in node.items():
        if name in _KINDS and not (says := _KINDS[name])[0](value):
            where = f"{part}.{name}" if part else name
            raise ValueError(f"{path}: {where} must be {says[1]}, got {value!r}")
    return kind(**more, **node)


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and len(value.splitlines()) == 1


def _is_lines(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_line, value))


_LINE = (_is_line, "one line of text")
_LINES = (_is_lines, "a list of texts")
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("title", "question", "baseline", "key", "x", "y"), _LINE),
    **dict.fromkeys(("quick", "full", "skipped", "series"), _LINES),
    "error": (lambda value: value is None or _is_line(value), "one line of text, or left out"),
    "digits": (lambda value: type(value) is int and 0 <= value <= 15, "a count of 0 to 15"),
    "scale": (
        lambda value: type(value) in (int, float) and 0 < abs(value) < math.inf,
        "a number (YAML reads 1e-6 as text, and 1.0e-6 as a number)",
    ),
    "joined": (lambda value: type(value) is bool, "true or false"),
    "rows": (lambda value: value in get_args(Rows), f"one of {', '.join(get_args(Rows))}"),
    "better": (
        lambda value: value in (None, *get_args(Better)),
        f"{' or '.join(get_args(Better))}, or left out",
    ),
    "repeats": (lambda value: type(value) is int and value >= 1, "at least 1"),
}


def _overrides(path: Path, part: str, node: Any) -> list[str]:
    if not _is_lines(node):
        raise ValueError(f"{path}: {part} must be a list of overrides, got {node!r}")
    return list(node)


def _check(path: Path, spec: TableSpec) -> None:
    """Refuses what would make a table that says something else than it seems to."""
    _check_mapping(path, "prepared", spec.prepared)
    for name, own in spec.prepared.items():
        _check_forms(path, f"prepared.{name}", own, {"base", "quick", "full"})
    _check_forms(path, "tasks", spec.tasks, {"quick", "full"})
    titles = [column.title for column in spec.columns]
    if len(set(titles)) < len(titles):
        raise ValueError(f"{path}: two columns have one title")
    for label in spec.row_labels:
        if label in (*titles, *CSV_COLUMNS):
            raise ValueError(
                f"{path}: a label must not be called {label!r}, as a column of the table or of table.csv is"
            )
    if (figure := spec.figure) is not None:
        for name in (figure.x, figure.y, *figure.series):
            if name not in (*titles, *spec.row_labels):
                raise ValueError(f"{path}: the figure's {name!r} is no column and no label")


def _check_forms(path: Path, part: str, node: Any, known: set[str]) -> None:
    _check_mapping(path, part, node, known)
    for form, own in node.items():
        _overrides(path, f"{part}.{form}", own)


def _check_mapping(path: Path, part: str, node: Any, known: set[str] | None = None) -> None:
    """Refuses what is no mapping, and of ``known`` names any other."""
    if not isinstance(node, Mapping):
        what = f"hold {', '.join(sorted(known))}" if known else "be names with values"
        raise ValueError(f"{path}: {part or 'the file'} must {what}, got {node!r}")
    for name in node if known is not None else ():
        if name not in (known or ()):
            where = f"{part}.{name}" if part else str(name)
            raise ValueError(
                f"{path}: there is no {where}; there are: {', '.join(sorted(known or ()))}"
            )
