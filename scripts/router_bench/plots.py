"""A picture per text: KL against the share of high tokens in each phase, and against prefill throughput."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenrouter.evaluation.curves import Curve, Panel, Point, plot_curves

from .summary import Row

PICKS = ("exact", "rank")
"""What is drawn: every router with the same number of high tokens."""


def plot_text(rows: Sequence[Row], path: Path) -> Path:
    """Draws the rows of one text.

    Args:
        rows: of ``rows_of``.
        path: of the PNG.
    """
    shown = [row for row in rows if row["pick"] in PICKS]
    prefill, decode = ([r for r in shown if r["phase"] == phase] for phase in ("prefill", "decode"))
    speed = "prefill tokens per second, as a multiple of all_high's"
    panels = [
        _panel("Forced prefill", "high share of the work, %", prefill, _share_pct),
        _panel("Forced prefill against throughput", speed, prefill, _speed),
        _panel("Forced decode", "high share of the work, %", decode, _share_pct),
    ]
    caption = (
        f"{rows[0]['text']}; equal shares of high tokens; bars: 90 % of a bootstrap over windows"
    )
    return plot_curves(panels, path, y_label="KL to float32, mnat per token", caption=caption)


def _panel(title: str, x_label: str, rows: Sequence[Row], x: Callable[[Row], float]) -> Panel:
    """A curve per router, each from all_low on."""
    low = [row for row in rows if row["router"] == "all_low"]
    names = dict.fromkeys(row["router"] for row in rows if row["router"] != "all_low")
    curves = []
    for name in names:
        own = [*low, *(row for row in rows if row["router"] == name)]
        curves.append(Curve(name=name, points=[_point(row, x(row)) for row in own]))
    return Panel(title=title, x_label=x_label, curves=curves)


def _point(row: Row, x: float) -> Point:
    kl: dict[str, Any] = row["kl_mean_nats"]
    return Point(x, 1e3 * kl["value"], 1e3 * kl["low"], 1e3 * kl["high"])


def _share_pct(row: Row) -> float:
    return 100.0 * float(row["high_frac"])


def _speed(row: Row) -> float:
    return float(row["prefill_tok_s_vs_all_high"]["median"])
