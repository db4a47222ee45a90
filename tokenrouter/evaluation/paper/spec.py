"""What a table is made of: runs, labels, columns, and a figure. One ``table.yaml`` each."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

Rows = Literal["systems", "chosen"]
Better = Literal["more", "less"]
BASELINE, SYSTEM = "all_high", "router"


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One number per row.

    Attributes:
        title: its heading, with the unit.
        key: where it stands: a name in the rows of systems.json, or a dotted path in metrics.json, which holds for the
            chosen system alone.
        digits: behind the point.
        scale: what the stored number is multiplied by, such as 1000 for thousandths.
        better: which way is up; None: neither, and nothing is compared.
        error: key of its standard error, where systems.json has one.
    """

    title: str
    key: str
    digits: int = 1
    scale: float = 1.0
    better: Better | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One column against another, or against a label that is a number.

    Attributes:
        x: title of a column, or name of a label.
        y: title of a column.
        series: names of the labels that make a line; the others are points on it.
        joined: whether points of a series are joined.
    """

    x: str
    y: str
    series: Sequence[str] = ()
    joined: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    """A table.

    Attributes:
        name: of its folder.
        title: heading.
        question: what it answers.
        runs: overrides of every run, by its labels; a label of a run is what it has of a dimension of the grid.
        labels: names of the dimensions; where systems are rows, theirs stand under ``router``.
        columns: in their order.
        figure: None: there is none.
        rows: ``systems``: every system of each run; ``chosen``: what the run is about.
        skipped: systems that get no row.
        quick, full: overrides that all runs get in the short and in the long form.
        repeats: of every run in the long form, each with a seed of its own.
        baseline: system that others of the same run are compared with.
        prepared: runs that the table's own look into, by name, each before those that name it: their overrides in both
            forms, in the short one and in the long one. ``@name`` in an override is the folder of that run, ``@run``
            that of the run itself.
        tasks: overrides that all runs get beside the others, ``quick`` and ``full``, where lm-eval and its questions
            are there; where not, columns that nothing was measured of are left out.
    """

    name: str
    title: str
    question: str
    runs: Mapping[tuple[str, ...], Sequence[str]]
    labels: Sequence[str]
    columns: Sequence[Column]
    figure: Figure | None = None
    rows: Rows = "chosen"
    skipped: Sequence[str] = ()
    quick: Sequence[str] = ()
    full: Sequence[str] = ()
    repeats: int = 3
    baseline: str = BASELINE
    prepared: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    tasks: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def row_labels(self) -> tuple[str, ...]:
        """Names of a row's labels; the system's under ``router``, added where the grid has none."""
        if self.rows == "chosen" or SYSTEM in self.labels:
            return tuple(self.labels)
        return (*self.labels, SYSTEM)

    def jobs(
        self, *, quick: bool, with_tasks: bool = False
    ) -> dict[tuple[str, ...], list[list[str]]]:
        """Overrides of every run by its labels: one list per repeat.

        Args:
            quick: the short form, without repeats.
            with_tasks: ask lm-eval's questions, too.
        """
        form = list(self._form(self.quick, self.full, quick=quick))
        if with_tasks:
            form += self._form(self.tasks.get("quick", []), self.tasks.get("full", []), quick=quick)
        seeds = range(1 if quick else self.repeats)
        return {
            labels: [[*own, *form, f"seed={seed}"] for seed in seeds]
            for labels, own in self.runs.items()
        }

    def preparations(self, *, quick: bool) -> dict[str, list[str]]:
        """Overrides of what must have run before, by name and in order."""
        return {
            name: [
                *own.get("base", []),
                *self._form(own.get("quick", []), own.get("full", []), quick=quick),
            ]
            for name, own in self.prepared.items()
        }

    @staticmethod
    def _form(short: Sequence[str], long: Sequence[str], *, quick: bool) -> Sequence[str]:
        return short if quick else long


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
        node = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no {path}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from None
    if not isinstance(node, dict):
        raise ValueError(f"{path} holds no options")
    known = {f.name for f in fields(TableSpec)} - {"name", "runs", "labels"} | {"base", "grid"}
    _refuse_unknown(path, "", node, known)
    labels, runs = _runs(path, node.pop("grid", {}), node.pop("base", []))
    columns = [_built(path, "columns", Column, each) for each in node.pop("columns", [])]
    figure = node.pop("figure", None)
    spec = TableSpec(
        name=path.parent.name,
        runs=runs,
        labels=labels,
        columns=columns,
        figure=None if figure is None else _built(path, "figure", Figure, figure),
        **node,
    )
    _check(path, spec)
    return spec


def _runs(
    path: Path, grids: Any, base: Sequence[str]
) -> tuple[tuple[str, ...], dict[tuple[str, ...], list[str]]]:
    """Labels, and the overrides of every run by its labels."""
    labels: tuple[str, ...] | None = None
    runs: dict[tuple[str, ...], list[str]] = {}
    for grid in grids if isinstance(grids, list) else [grids]:
        if not isinstance(grid, dict) or (labels is not None and tuple(grid) != labels):
            raise ValueError(f"{path}: grid must map labels to choices; grids of a list, the same")
        labels = tuple(grid)
        choices = [_choices(path, label, own).items() for label, own in grid.items()]
        for chosen in itertools.product(*choices):
            names = tuple(name for name, _ in chosen)
            if names in runs:
                raise ValueError(f"{path}: two grids have {', '.join(names)}")
            runs[names] = [*base, *itertools.chain(*(own for _, own in chosen))]
    return labels or (), runs


def _choices(path: Path, label: str, node: Any) -> dict[str, list[str]]:
    """Overrides by the name that is shown: of ``key=value`` the value."""
    if isinstance(node, list):
        node = {str(each).rpartition("=")[2]: each for each in node}
    if not isinstance(node, dict) or not node:
        raise ValueError(f"{path}: grid.{label} must be a list of overrides, or names with theirs")
    return {
        str(name): [str(o) for o in (own if isinstance(own, list) else [own])]
        for name, own in node.items()
    }


def _built(path: Path, part: str, kind: Any, node: Any) -> Any:
    known = {f.name for f in fields(kind)}
    if not isinstance(node, dict):
        raise ValueError(f"{path}: {part} must hold {', '.join(sorted(known))}, got {node!r}")
    _refuse_unknown(path, part, node, known)
    try:
        return kind(**node)
    except TypeError as error:
        raise ValueError(f"{path}: {part}: {error}") from None


def _check(path: Path, spec: TableSpec) -> None:
    """Refuses what would make an empty table, or one that says something else than it seems to."""
    if not spec.columns:
        raise ValueError(f"{path}: a table needs columns")
    if spec.rows not in get_args(Rows):
        raise ValueError(
            f"{path}: rows must be one of {', '.join(get_args(Rows))}, got {spec.rows!r}"
        )
    for column in spec.columns:
        if column.better not in (None, *get_args(Better)):
            raise ValueError(
                f"{path}: better of {column.title!r} must be more or less, or left out"
            )
    for name, own in spec.prepared.items():
        _refuse_unknown(path, f"prepared.{name}", own, {"base", "quick", "full"})
    _refuse_unknown(path, "tasks", spec.tasks, {"quick", "full"})
    titles = [column.title for column in spec.columns]
    if len(set(titles)) < len(titles):
        raise ValueError(f"{path}: two columns have one title")
    if type(spec.repeats) is not int or spec.repeats < 1:
        raise ValueError(f"{path}: repeats must be at least 1, got {spec.repeats!r}")
    if (figure := spec.figure) is not None:
        for name in (figure.x, figure.y, *figure.series):
            if name not in (*titles, *spec.row_labels):
                raise ValueError(f"{path}: the figure's {name!r} is no column and no label")


def _refuse_unknown(path: Path, part: str, node: Mapping[str, Any], known: set[str]) -> None:
    for name in node:
        if name not in known:
            where = f"{part}.{name}" if part else str(name)
            raise ValueError(f"{path}: there is no {where}; there are: {', '.join(sorted(known))}")
