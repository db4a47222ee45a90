"""Guards against tables and plots that break, hide or cover a system."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from tokenrouter.evaluation.curves import Curve, Panel, Point, plot_curves
from tokenrouter.evaluation.plots import plot_routes, plot_tradeoff
from tokenrouter.evaluation.rows import SystemRow
from tokenrouter.evaluation.shares import route_shares
from tokenrouter.evaluation.tables import format_table, markdown
from tokenrouter.features import TokenTypeTable
from tokenrouter.outputs import CompletionOutput, RequestOutput
from tokenrouter.telemetry import Spread


def _row(name: str, tok_s: float, kl: float | None, **values: Any) -> SystemRow:
    output = Spread(median=tok_s, min=tok_s - 1, max=tok_s + 2)
    return SystemRow(
        name=name, chosen=name == "rule", output_tok_s=output, kl_mean_nats=kl, **values
    )


ROWS = [
    _row("all_high", 100.0, 0.001),
    _row("all_low", 120.0, 0.0316, kl_stderr_nats=0.001),
    _row("request_level", 111.0, 0.0230),
    _row("static_batch", 100.5, 0.001),
    _row("rule", 111.5, 0.0229),
]


def _png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_table_has_a_row_per_system_and_marks_the_chosen_one() -> None:
    lines = format_table(ROWS, ["Note one.", "Note two."]).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:7]] == [
        "all_high",
        "all_low",
        "request_level",
        "static_batch",
        "**rule**",
    ]
    assert "111.5 [110.5, 113.5]" in lines[6] and "22.900" in lines[6]
    assert lines[-2:] == ["Note one.", "Note two."]
    assert len({len(line) for line in lines[:7]}) == 1


def test_a_narrow_column_is_a_column() -> None:
    """A rule of a lone colon, which no reader of markdown takes for a table's."""
    lines = markdown(["system", "n"], [["rule", "4"]]).splitlines()
    assert lines == ["| system |  n |", "| ------ | -: |", "| rule   |  4 |"]


def test_table_leaves_out_what_was_not_measured() -> None:
    header = format_table([_row("all_high", 5.0, None)], []).splitlines()[0]
    assert "output tok/s" in header and "KL" not in header and "ppl" not in header


def test_tradeoff_labels_every_system_and_covers_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes: dict[str, Any] = {}
    save = Figure.savefig

    def look(figure: Figure, *arguments: Any, **options: Any) -> None:
        for text in figure.axes[0].texts:
            boxes[text.get_text()] = text.get_window_extent()
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", look)
    path = plot_tradeoff(ROWS, tmp_path / "tradeoff.png", "caption")
    assert _png_size(path)[0] > 800
    assert sorted(boxes) == sorted(row.name for row in ROWS)
    for name, box in boxes.items():
        assert box.count_overlaps([other for key, other in boxes.items() if key != name]) == 0


def test_table_and_plot_say_the_shares_of_quality_and_of_throughput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A point's KL and its throughput may belong to different shares, and no caption said so."""
    row = _row(
        "rule", 111.5, 0.02, high_frac=0.09, eval_high_frac=0.101, eval_decode_high_frac=0.098
    )
    header, _, values = format_table([row], []).splitlines()[:3]
    titles, cells = ([cell.strip() for cell in line.split("|")] for line in (header, values))
    shown = dict(zip(titles, cells, strict=True))
    assert shown["high %, text"] == "10.1" and shown["high %, text decode"] == "9.8"
    assert shown["high %, requests"] == "9.0"
    captions: list[str] = []
    monkeypatch.setattr(Figure, "supxlabel", lambda _, text, **options: captions.append(str(text)))
    plot_tradeoff([row], tmp_path / "tradeoff.png", "caption")
    assert captions == [
        "rule, high: 10.1 % of the windows' prefill (KL), 9.8 % of their decode, "
        "9.0 % of the requests (throughput)\ncaption"
    ]


def test_routes_plot_is_drawn_for_any_route_names(tmp_path: Path) -> None:
    shares = {"by position": {"0": {"a": 1, "b": 0}, "1-15": {"a": 3, "b": 12}}}
    assert _png_size(plot_routes(shares, ("a", "b"), tmp_path / "routes.png"))[0] > 800


def test_no_two_routes_look_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight routes in six colours; a legend that runs out of the picture."""
    names = [f"high_0_{number}+28_30" for number in range(20)]
    looks: dict[str, tuple[Any, str]] = {}
    save = Figure.savefig

    def look(figure: Figure, *arguments: Any, **options: Any) -> None:
        for bars in figure.axes[0].containers:
            looks[bars.get_label()] = (bars[0].get_facecolor(), bars[0].get_hatch() or "")
        save(figure, *arguments, **options)
        box = figure.legends[0].get_window_extent()
        assert box.x0 >= 0 and figure.axes[0].bbox.height > box.height

    monkeypatch.setattr(Figure, "savefig", look)
    shares = {"by position": {"0": dict.fromkeys(names, 1)}}
    plot_routes(shares, names, tmp_path / "routes.png")
    assert list(looks) == names
    assert len({colour for colour, _ in list(looks.values())[:16]}) == 16
    assert len(set(looks.values())) == 20 and [looks[name][1] for name in names[:16]] == [""] * 16


def test_curves_lie_where_their_points_are_and_look_alike_in_every_panel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bars around another point, a router in another colour in the next panel, an axis that hides how small KL is."""
    kept: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: kept.append(figure))
    one = Curve(name="rule", points=[Point(1, 4, 3, 6, 0.5, 2), Point(3, 2, 1, 3, 3, 3)])
    two = Curve(name="mlp", points=[Point(2, 5, 4, 7, 2, 2)])
    panels = [
        Panel(title="a", x_label="x", curves=[one, two]),
        Panel(title="b", x_label="y", curves=[two]),
    ]
    plot_curves(panels, tmp_path / "curves.png", y_label="KL", caption="all")
    [figure] = kept
    left, right = figure.axes
    [rule, mlp], [again] = left.containers, right.containers
    assert rule[0].get_xydata().tolist() == [[1, 4], [3, 2]]
    across, along = (bars.get_segments() for bars in rule[2])
    assert across[0].tolist() == [[0.5, 4], [2, 4]] and along[0].tolist() == [[1, 3], [1, 6]]
    assert again[0].get_color() == mlp[0].get_color() != rule[0].get_color()
    assert left.get_ylim()[0] == 0 == right.get_ylim()[0]
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["rule", "mlp"]


def test_curves_below_zero_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A perplexity that fell by a percent, cut off by an axis that begins at 0."""
    kept: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: kept.append(figure))
    panel = Panel(
        title="$", x_label="x_$1$", curves=[Curve(name="$a$", points=[Point(1, -1, -2, 3, 1, 1)])]
    )
    plot_curves([panel], tmp_path / "curves.png", y_label="ppl %", caption="all")
    assert kept[0].axes[0].get_ylim()[0] <= -2
    assert not kept[0].axes[0].title.get_parse_math(), "a $ is a $"


def _outputs() -> list[RequestOutput]:
    completion = CompletionOutput(
        index=0, text="", delta="", token_ids=(3, 4), routes=(0, 1, 1, 1, -1)
    )
    return [
        RequestOutput(
            request_id="0",
            prompt=None,
            prompt_token_ids=(0, 1, 2),
            outputs=(completion,),
            finished=True,
        )
    ]


def test_shares_count_fed_tokens_once_by_position_and_type() -> None:
    types = TokenTypeTable.from_texts(["\n", " plain", "7", "7", "7"])
    shares = route_shares(_outputs(), ("high", "low"), types)
    assert shares["by position"] == {"0": {"high": 1, "low": 0}, "1-15": {"high": 0, "low": 3}}
    assert shares["by token type"]["number"] == {"high": 0, "low": 2}
    assert shares["by token type"]["newline"] == {"high": 1, "low": 0}
    for panel in shares.values():
        assert sum(np.sum(list(counts.values())) for counts in panel.values()) == 4
