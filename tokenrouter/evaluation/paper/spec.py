"""What a table is made of: runs, labels, columns, and a figure. One ``table.yaml`` each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Rows = Literal["systems", "chosen"]
Better = Literal["more", "less"]
BASELINE, SYSTEM = "all_high", "router"
CSV_COLUMNS = ("column", "value", "low", "high", "runs", "verdict")
"""Of table.csv, behind the labels."""


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
