"""Lines through points with intervals, several systems in each of several panels."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tokenrouter.evaluation.plots import INK, MUTED, ROUTE_COLOURS, figure_of

MARKERS = "osD^vPX*<>"


class Point(NamedTuple):
    """A value ``y`` that lies in ``low`` to ``high``, at ``x`` in ``x_low`` to ``x_high``."""

    x: float
    y: float
    low: float
    high: float
    x_low: float
    x_high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One system.

    Attributes:
        name: equal names look the same in every panel.
        points: joined in this order.
    """

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """Curves over one axis; all panels share the other."""

    title: str
    x_label: str
    curves: Sequence[Curve]


def plot_curves(
    panels: Sequence[Panel], path: Path, *, y_label: str, caption: str, joined: bool = True
) -> Path:
    """Draws the panels side by side over one y axis, which begins at 0 or below, with a legend of all names.

    Args:
        panels: at least one.
        path: the file to write, PNG or PDF by its ending.
        y_label: of the shared axis.
        caption: below all.
        joined: draw lines through a curve's points.
    """
    names = list(dict.fromkeys(curve.name for panel in panels for curve in panel.curves))
    with figure_of(5.2 * len(panels), 4.6, widths=[1] * len(panels)) as (figure, axes_of):
        handles = {}
        for axes, panel in zip(axes_of, panels, strict=True):
            axes.sharey(axes_of[0])
            for curve in panel.curves:
                index = names.index(curve.name)
                points = curve.points
                handles[curve.name] = axes.errorbar(
                    [p.x for p in points],
                    [p.y for p in points],
                    xerr=[[p.x - p.x_low for p in points], [p.x_high - p.x for p in points]],
                    yerr=[[p.y - p.low for p in points], [p.high - p.y for p in points]],
                    marker=MARKERS[index % len(MARKERS)],
                    markersize=5,
                    color=ROUTE_COLOURS[index % len(ROUTE_COLOURS)],
                    linestyle=_line(index) if joined else "none",
                    linewidth=1.2,
                    elinewidth=0.8,
                    capsize=2,
                )
            axes.set_title(panel.title, color=INK)
            axes.set_xlabel(panel.x_label)
            axes.grid(color="#e5e7eb", linewidth=0.8)
            axes.set_axisbelow(True)
        lowest = min(
            (p.low for panel in panels for c in panel.curves for p in c.points), default=0.0
        )
        if lowest >= 0:
            axes_of[0].set_ylim(bottom=0)
        axes_of[0].set_ylabel(y_label)
        figure.supxlabel(caption, fontsize=7.5, color=MUTED, x=0.01, ha="left")
        order = [name for name in names if name in handles]
        figure.legend(
            [handles[name] for name in order],
            order,
            loc="outside upper right",
            ncols=len(order),
            frameon=False,
            fontsize=9,
        )
        figure.savefig(path)
    return path


def _line(index: int) -> str:
    return "-" if index < len(ROUTE_COLOURS) else "--"
