"""A table's figure: one column against another, or against a label that is a number."""

import math
from collections.abc import Sequence
from pathlib import Path

from tokenrouter.evaluation.curves import Curve, Panel, Point, plot_curves

from .intervals import Estimate
from .spec import Figure
from .table import Row, Table

FIGURES = ("figure.png", "figure.pdf")


def check_figure(table: Table) -> None:
    """Raises ValueError where a table has a figure in which nothing would be drawn."""
    figure = table.spec.figure
    if figure is not None and not _curves(table, figure):
        raise ValueError(
            f"table {table.spec.name}: no row has both {figure.x} and {figure.y}: there is nothing to draw"
        )


def draw_figure(table: Table, folder: Path, caption: str) -> list[Path]:
    """Writes the figure in each form, ``figure.png`` first; nothing where the table has none.

    Args:
        table: that ``check_figure`` passes.
        folder: to write to.
        caption: below it.
    """
    figure = table.spec.figure
    if figure is None:
        return []
    panel = Panel(title=table.spec.title, x_label=figure.x, curves=_curves(table, figure))
    return [
        plot_curves([panel], folder / name, y_label=figure.y, caption=caption, joined=figure.joined)
        for name in FIGURES
    ]


def _curves(table: Table, figure: Figure) -> list[Curve]:
    names = table.spec.row_labels
    points: dict[str, list[Point]] = {}
    for row in table.rows:
        x, y = _coordinate(row, names, figure.x), row.cells.get(figure.y)
        if x is None or y is None:
            continue
        series = " ".join(row.labels[names.index(name)] for name in figure.series)
        (x_low, x_high), (low, high) = _bounds(x), _bounds(y)
        point = Point(x=x.value, y=y.value, low=low, high=high, x_low=x_low, x_high=x_high)
        points.setdefault(series or table.spec.title, []).append(point)
    return [Curve(name=name, points=sorted(own, key=lambda p: p.x)) for name, own in points.items()]


def _coordinate(row: Row, names: Sequence[str], name: str) -> Estimate | None:
    """Of a column, or of a label that reads as a number."""
    if name not in names:
        return row.cells.get(name)
    try:
        value = float(row.labels[names.index(name)])
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    return Estimate(value=value, low=value, high=value, samples=())


def _bounds(value: Estimate) -> tuple[float, float]:
    return (value.low, value.high) if value.is_bounded else (value.value, value.value)
