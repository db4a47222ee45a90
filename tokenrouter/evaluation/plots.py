"""tradeoff.png: accuracy loss against throughput. routes.png: which tokens take which route."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tokenrouter.evaluation.rows import SystemRow

INK, MUTED, CHOSEN = "#222222", "#6b7280", "#c2410c"
ROUTE_COLOURS = (
    *("#1d4e89", "#f4a259", "#5b8e7d", "#8c4a6e", "#bc4b51", "#6c757d", "#9ac93a", "#a77bd8"),
    *("#1fc99a", "#e0489b", "#6b6a14", "#3fb4e0", "#cfae1f", "#cdb4ee", "#2f72e0", "#1f7a2e"),
)
"""As many as a router of four layer groups has routes; bars of further ones repeat them, hatched."""
HATCHES = ("", "///", "xxx", "...")
LEGEND_CHARACTERS = 120
"""Of a line of the legend of routes."""
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 150,
    "text.parse_math": False,  # names may have a $
}


def plot_tradeoff(rows: Sequence[SystemRow], path: Path, caption: str) -> Path:
    """Every system as a labelled point: KL against output tok/s, with the spread of both.

    Above ``caption`` stands the chosen router's share of high tokens, for each coordinate its own.
    """
    with figure_of(7.6, 4.8) as (figure, panels):
        axes = panels[0]
        shown = [
            row for row in rows if row.kl_mean_nats is not None and row.output_tok_s is not None
        ]
        points = [_draw_system(axes, row) for row in shown]
        axes.set_xlabel("output tokens per second (median; bar: min to max)")
        axes.set_ylabel("KL to the reference, mnat per token\n(bar: standard error over windows)")
        axes.set_title("Accuracy loss against throughput; better is down and right", color=INK)
        axes.margins(x=0.18, y=0.18)
        axes.set_ylim(bottom=-0.06 * axes.get_ylim()[1])
        axes.grid(color="#e5e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        lines = [_shares_line(row) for row in shown if row.chosen] + [caption]
        figure.supxlabel("\n".join(lines), fontsize=7.5, color=MUTED, x=0.01, ha="left")
        _label_points(figure, axes, points)
        figure.savefig(path)
    return path


def plot_routes(
    shares: Mapping[str, Mapping[str, Mapping[str, int]]], route_names: Sequence[str], path: Path
) -> Path:
    """Stacked shares of tokens per route.

    Args:
        shares: panel title -> bar label -> route name -> number of tokens.
        route_names: the order of the stack.
        path: the PNG to write.
    """
    with figure_of(10.5, 4.4, widths=[max(len(bars), 1) for bars in shares.values()]) as (
        figure,
        panels,
    ):
        for axes, (title, bars) in zip(panels, shares.items(), strict=True):
            totals = {label: sum(counts.values()) for label, counts in bars.items()}
            base = [0.0] * len(bars)
            for index, route in enumerate(route_names):
                heights = [
                    100.0 * counts.get(route, 0) / max(totals[label], 1)
                    for label, counts in bars.items()
                ]
                repeat, colour = divmod(index, len(ROUTE_COLOURS))
                axes.bar(
                    range(len(bars)),
                    heights,
                    bottom=base,
                    color=ROUTE_COLOURS[colour],
                    hatch=HATCHES[repeat % len(HATCHES)],
                    edgecolor="white",
                    linewidth=0,
                    width=0.72,
                    label=route,
                )
                base = [low + height for low, height in zip(base, heights, strict=True)]
            labels = [f"{label}\n{totals[label]:,}" for label in bars]
            axes.set_xticks(range(len(bars)), labels, fontsize=8.5)
            axes.set_ylim(0, 100)
            axes.set_title(title, color=INK)
        panels[0].set_ylabel("share of tokens, %")
        note = "Requests of the last pass; number of tokens below each label."
        figure.supxlabel(note, fontsize=7.5, color=MUTED, x=0.01, ha="left")
        handles, labels = panels[0].get_legend_handles_labels()
        fitting = LEGEND_CHARACTERS // (max(map(len, labels), default=0) + 8)
        columns = max(min(fitting, len(labels)), 1)
        figure.legend(handles, labels, loc="outside upper right", ncols=columns, frameon=False)
        figure.savefig(path)
    return path


def _shares_line(row: SystemRow) -> str:
    """The shares of high tokens that a point's two coordinates belong to."""
    shares = (
        ("of the windows' prefill (KL)", row.eval_high_frac),
        ("of their decode", row.eval_decode_high_frac),
        ("of the requests (throughput)", row.high_frac),
    )
    known = [f"{100.0 * share:.1f} % {what}" for what, share in shares if share is not None]
    return f"{row.name}, high: {', '.join(known) or 'not measured'}"


class _Point(NamedTuple):
    x: float
    y: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    label: str
    colour: str


def _draw_system(axes: Any, row: SystemRow) -> _Point:
    assert row.output_tok_s is not None and row.kl_mean_nats is not None
    speed, loss, error = row.output_tok_s, 1e3 * row.kl_mean_nats, 1e3 * (row.kl_stderr_nats or 0.0)
    colour = CHOSEN if row.chosen else ROUTE_COLOURS[0]
    axes.errorbar(
        speed.median,
        loss,
        xerr=[[speed.median - speed.min], [speed.max - speed.median]],
        yerr=error,
        fmt="D" if row.chosen else "o",
        markersize=7,
        color=colour,
        elinewidth=1,
        capsize=2.5,
    )
    bar = (loss - error, loss + error)
    return _Point(speed.median, loss, (speed.min, speed.max), bar, row.name, colour)


@contextmanager
def figure_of(
    width: float, height: float, widths: Sequence[int] = (1,)
) -> Iterator[tuple[Any, list[Any]]]:
    """A figure in our style with one panel per entry of ``widths``; no global state, no display.

    Args:
        width: in inches.
        height: in inches.
        widths: of the panels, relative to each other.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        grid = figure.add_gridspec(1, len(widths), width_ratios=list(widths))
        yield figure, [figure.add_subplot(grid[0, index]) for index in range(len(widths))]


_OFFSETS = [
    (sign_x * distance, sign_y * rise)
    for distance, rise in ((9, 5), (9, 14), (22, 5), (22, 22), (40, 40))
    for sign_x, sign_y in ((1, 1), (-1, 1), (1, -1), (-1, -1))
]


def _label_points(figure: Any, axes: Any, points: Sequence[_Point]) -> None:
    """Puts each label where it covers no marker, no bar and no other label."""
    figure.canvas.draw()
    taken = [box for point in points for box in _occupied(axes, point, 6 * figure.dpi / 72)]
    for point in points:
        placed, fewest = None, 10**6
        for dx, dy in _OFFSETS:
            text = axes.annotate(
                point.label,
                (point.x, point.y),
                xytext=(dx, dy),
                textcoords="offset points",
                ha="left" if dx > 0 else "right",
                va="bottom" if dy > 0 else "top",
                color=point.colour,
                fontsize=9.5,
            )
            box = text.get_window_extent()
            inside = axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max)
            overlaps = box.count_overlaps(taken) + (0 if inside else 10)
            loser, placed = (placed, text) if overlaps < fewest else (text, placed)
            fewest = min(fewest, overlaps)
            if loser is not None:
                loser.remove()
            if fewest == 0:
                break
        assert placed is not None
        taken.append(placed.get_window_extent())


def _occupied(axes: Any, point: _Point, radius: float) -> list[Any]:
    """Pixel boxes of a point's marker and its two bars."""
    from matplotlib.transforms import Bbox

    x, y = axes.transData.transform((point.x, point.y))
    left, right = (axes.transData.transform((value, point.y))[0] for value in point.x_range)
    low, high = (axes.transData.transform((point.x, value))[1] for value in point.y_range)
    return [
        Bbox([[x - radius, y - radius], [x + radius, y + radius]]),
        Bbox([[left, y - 2], [right, y + 2]]),
        Bbox([[x - 2, low], [x + 2, high]]),
    ]
