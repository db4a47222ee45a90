"""From runs to rows: numbers with intervals, and what differs from the baseline of the same runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenrouter.evaluation.rows import is_finite_number

from .intervals import NORMAL_95, Estimate, Sample, Verdict, estimate, t_95, verdict
from .runs import Run
from .spec import SYSTEM, Column, TableSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of a table.

    Attributes:
        labels: of the row, in the order of the table's.
        cells: by a column's title; a column that nothing was measured of is left out.
        verdicts: of those columns that say which way is up, beside the baseline of the same runs.
    """

    labels: tuple[str, ...]
    cells: Mapping[str, Estimate]
    verdicts: Mapping[str, Verdict]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows with the spec that they follow.

    Attributes:
        spec: labels, columns, figure.
        rows: at least one, with at least one cell each.
        runs: that the numbers are from.
    """

    spec: TableSpec
    rows: Sequence[Row]
    runs: Sequence[Run]

    @property
    def columns(self) -> list[Column]:
        """Those that hold a number."""
        return [c for c in self.spec.columns if any(c.title in row.cells for row in self.rows)]


FOLLOWING = ("request_level",)
"""Baselines that follow the run's router in its share of high tokens, and in which they are."""
FEW = {"kl_stderr_nats": "num_windows"}
"""By a standard error's key that of the number that it is over, where that may be small."""
Measured = list[tuple[Sample, Sample | None]]
"""Of one column: each run's number, and its baseline's."""


def build_table(spec: TableSpec, runs: Mapping[tuple[str, ...], Sequence[Run]]) -> Table:
    """Joins runs to a table.

    A system that is a baseline in several runs has one row, over all of them; one that follows each run's router
    (``FOLLOWING``) has one for each, where a label tells the routers apart.

    Args:
        spec: what is shown.
        runs: by the labels of ``spec.runs``: the repeats of each.

    Raises:
        ValueError: no run, or none that measured a column; runs of different models, machines or numbers of threads
            (a label ``model`` or ``threads`` tells these apart), or none that has the baseline.
    """
    flat = [run for repeats in runs.values() for run in repeats]
    _check_alike(spec, flat)
    found: dict[tuple[str, ...], dict[str, Measured]] = {}
    for labels, repeats in runs.items():
        for run in repeats:
            for row, system in _rows_of(spec, labels, run):
                cells = found.setdefault(row, {})
                for column in spec.columns:
                    if (own := measured(column, run, system)) is not None:
                        other = (
                            None
                            if system == spec.baseline
                            else measured(column, run, spec.baseline)
                        )
                        cells.setdefault(column.title, []).append((own, other))
    _check_baseline(spec, flat)
    rows = [_row(spec, labels, cells) for labels, cells in found.items() if cells]
    if not rows:
        wanted = ", ".join(column.key for column in spec.columns)
        raise ValueError(
            f"table {spec.name}: no run measured any of {wanted}: nothing is written. Runs: "
            f"{', '.join(str(run.path) for run in flat) or 'none'}"
        )
    return Table(spec=spec, rows=rows, runs=flat)


def _rows_of(
    spec: TableSpec, labels: tuple[str, ...], run: Run
) -> list[tuple[tuple[str, ...], str | None]]:
    """Labels and system of the rows that a run adds to."""
    if spec.rows == "chosen":
        return [(labels, run.chosen)]
    named = dict(zip(spec.labels, labels, strict=True))
    rows: list[tuple[tuple[str, ...], str | None]] = []
    for system in run.systems:
        if system in spec.skipped:
            continue
        shown = named.get(SYSTEM, system) if system == run.chosen else system
        if system in FOLLOWING and system != run.chosen and SYSTEM in named:
            shown = f"{system}, as {named[SYSTEM]}"
        rows.append((tuple((named | {SYSTEM: shown})[name] for name in spec.row_labels), system))
    return rows


def measured(column: Column, run: Run, system: str | None) -> Sample | None:
    """What a run says of a column.

    Args:
        column: which.
        run: whose.
        system: of the run's; None where it has none.

    Returns:
        None: nothing, or no finite number.
    """
    row: Mapping[str, Any] = {} if system is None else run.systems.get(system, {})
    if column.key in row:
        value = row[column.key]
    elif system == run.chosen:
        value = _at(run.metrics, column.key)
    else:
        return None
    if isinstance(value, Mapping) and "median" in value:  # of passes, with their spread
        numbers = [value.get(key) for key in ("median", "min", "max")]
        return _of_passes(numbers, row.get("num_passes") or 2, column.scale)
    if isinstance(value, bool) or not is_finite_number(value):
        return None
    scaled, half = float(value) * column.scale, math.nan
    error = row.get(column.error) if column.error else None
    if error is not None and is_finite_number(error):
        count = row.get(FEW.get(column.error or "", "")) or 0
        factor = t_95(count - 1) if count > 1 else NORMAL_95
        half = factor * abs(error * column.scale)
    return Sample(value=scaled, low=scaled - half, high=scaled + half)


def _of_passes(numbers: Sequence[Any], num_passes: int, scale: float) -> Sample | None:
    """Of median, smallest and largest; two passes where a run does not say how many."""
    if not all(map(is_finite_number, numbers)):
        return None
    value, *bounds = (float(number) * scale for number in numbers)
    low, high = sorted(bounds)
    if low == high:  # one pass knows no spread
        return Sample(value=value)
    return Sample(value=value, low=low, high=high, num_passes=num_passes)


def _at(tree: Mapping[str, Any], path: str) -> Any:
    node: Any = tree
    for key in path.split("."):
        if not isinstance(node, Mapping) or key not in node:
            return None
        node = node[key]
    return node


def _row(spec: TableSpec, labels: tuple[str, ...], cells: Mapping[str, Measured]) -> Row:
    verdicts = {}
    for column in spec.columns:
        if column.better is None or column.title not in cells:
            continue
        pairs = [(own, other) for own, other in cells[column.title] if other is not None]
        if not pairs:
            continue
        own, other = (estimate([pair[side] for pair in pairs]) for side in (0, 1))
        if (found := verdict(own, other, column.better)) is not None:
            verdicts[column.title] = found
    return Row(
        labels=labels,
        cells={title: estimate([own for own, _ in pairs]) for title, pairs in cells.items()},
        verdicts=verdicts,
    )


def _check_alike(spec: TableSpec, runs: Sequence[Run]) -> None:
    """Numbers of one table are of one model on one kind of machine, unless a label tells them apart."""
    if "model" not in spec.labels:
        _refuse_two(spec, runs, "models", lambda run: run.model_hash)
    _refuse_two(spec, runs, "machines", lambda run: run.machine)
    if "threads" not in spec.labels:
        _refuse_two(spec, runs, "numbers of threads", lambda run: run.num_threads)


def _check_baseline(spec: TableSpec, runs: Sequence[Run]) -> None:
    """A column that says which way is up is compared with something."""
    names = dict.fromkeys(name for run in runs for name in run.systems)
    if names and spec.baseline not in names and any(column.better for column in spec.columns):
        raise ValueError(
            f"table {spec.name}: no run has its baseline {spec.baseline}; they have {', '.join(names)}"
        )


def _refuse_two(spec: TableSpec, runs: Sequence[Run], what: str, of: Any) -> None:
    first: dict[str, Run] = {}
    for run in runs:
        if (value := of(run)) is not None:
            first.setdefault(repr(value), run)
    if len(first) > 1:
        one, other = list(first.values())[:2]
        raise ValueError(
            f"table {spec.name}: {one.path} and {other.path} are of different {what}: leave one out, or run them again "
            "in one place"
        )
