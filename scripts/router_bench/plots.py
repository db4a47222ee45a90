"""A picture per text: KL against the share of high tokens and against throughput, in each phase."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokenrouter.evaluation.curves import Curve, Panel, Point, plot_curves

from .summary import Row

PICKS = ("exact", "rank")
"""What is drawn: every router with the same number of high tokens."""
Range = tuple[float, float, float]


def plot_text(rows: Sequence[Row], path: Path) -> Path:
    """Draws the rows of one text.

    Args:
        rows: of ``rows_of``.
        path: of the PNG.
    """
    shown = [row for row in rows if row["pick"] in PICKS]
    prefill, decode = ([r for r in shown if r["phase"] == phase] for phase in ("prefill", "decode"))
    speed = "tokens per second, as a multiple of all_high's"
    timed = [row for row in decode if "tok_s_vs_all_high" in row]
    panels = [
        _panel("Forced prefill", "high share of the work, %", prefill, _share_pct),
        _panel("Forced prefill against throughput", speed, prefill, _speed),
        _panel("Forced decode", "high share of the work, %", decode, _share_pct),
        _panel("Forced decode against throughput", speed, timed, _speed),
    ]
    panels = [panel for panel in panels if panel.curves]
    caption = f"{rows[0]['text']}; equal shares of high tokens; bars: 90 % of a bootstrap over windows, and turns"
    return plot_curves(panels, path, y_label="KL to float32, mnat per token", caption=caption)


def _panel(title: str, x_label: str, rows: Sequence[Row], x_of: Callable[[Row], Range]) -> Panel:
    """A curve per router, each from all_low on."""
    low = [row for row in rows if row["router"] == "all_low"]
    names = dict.fromkeys(row["router"] for row in rows if row["router"] != "all_low")
    curves = []
    for name in names:
        own = [*low, *(row for row in rows if row["router"] == name)]
        curves.append(Curve(name=name, points=[_point(row, *x_of(row)) for row in own]))
    return Panel(title=title, x_label=x_label, curves=curves)


def _point(row: Row, x: float, x_low: float, x_high: float) -> Point:
    kl: Mapping[str, float] = row["kl_mean_nats"]
    return Point(x, 1e3 * kl["value"], 1e3 * kl["low"], 1e3 * kl["high"], x_low, x_high)


def _share_pct(row: Row) -> Range:
    share_pct = 100.0 * row["high_frac"]
    return share_pct, share_pct, share_pct


def _speed(row: Row) -> Range:
    speed: Mapping[str, float] = row["tok_s_vs_all_high"]
    return speed["median"], speed["min"], speed["max"]
