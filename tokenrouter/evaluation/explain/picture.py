"""explain.png: the same text as a picture, for a terminal that shows no pages."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenrouter.evaluation.explain.page import COLOURS, REPEATS, opacity
from tokenrouter.evaluation.explain.tokens import ExplainedToken, Explanation

COLUMNS, MAX_LINES = 100, 120
FONT, FONT_PT, LINE_PT = "DejaVu Sans Mono", 9.0, 15.0
ADVANCE = 0.602
"""Width of a character of that font, as a part of its size."""
INK, MUTED, NONE = "#16181d", "#5b6472", "#e4e7eb"


class Piece(NamedTuple):
    """A stretch of one token in one line."""

    line: int
    column: int
    text: str
    token: int


class Key(NamedTuple):
    """A route's entry in the head: its swatch, and behind it its name and count."""

    line: int
    column: int
    text: str


def draw(explanation: Explanation, path: Path) -> Path:
    """Writes the PNG: at most 120 lines of 100 characters, with a note where the text is longer.

    Characters that the font lacks are shown as boxes.
    """
    import matplotlib
    from matplotlib.figure import Figure

    pieces = lay_out([token.text for token in explanation.tokens])
    shown = [piece for piece in pieces if piece.line < MAX_LINES]
    keys = lay_out_keys(explanation)
    head_lines = 3 + keys[-1].line
    num_lines = head_lines + 1 + (shown[-1].line if shown else 0)
    size_in = ((COLUMNS + 2) * ADVANCE * FONT_PT / 72, (num_lines + 1) * LINE_PT / 72)
    with matplotlib.rc_context({"savefig.dpi": 150}):
        figure = Figure(figsize=size_in)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(-1, COLUMNS + 1)
        axes.set_ylim(num_lines + 0.5, -0.5)
        axes.set_axis_off()
        _head(axes, explanation, keys, is_cut=len(shown) < len(pieces))
        known = _characters()
        names = list(explanation.routes)
        for piece in shown:
            y = piece.line + head_lines + 0.5
            _draw_piece(axes, piece, y, explanation.tokens[piece.token], names, known)
        figure.savefig(path)
    return path


def lay_out(texts: Sequence[str], columns: int = COLUMNS) -> list[Piece]:
    """Breaks tokens into lines of at most ``columns`` characters; a line break in a text begins a new one."""
    pieces, line, column = [], 0, 0
    for token, text in enumerate(texts):
        for number, part in enumerate(text.split("\n")):
            if number:
                line, column = line + 1, 0
            while part:
                if column == columns:
                    line, column = line + 1, 0
                taken, part = part[: columns - column], part[columns - column :]
                pieces.append(Piece(line, column, taken, token))
                column += len(taken)
    return pieces


def lay_out_keys(explanation: Explanation, columns: int = COLUMNS) -> list[Key]:
    """Every route with its count and share, in the order of the routes and in as many lines as they need."""
    counts = explanation.counts()
    total = max(sum(counts.values()), 1)
    keys, line, column = [], 0, 0
    for name, count in counts.items():
        text = f"{name} {count} ({count / total:.1%})"[: columns - 3]
        if column and column + len(text) + 3 > columns:
            line, column = line + 1, 0
        keys.append(Key(line, column, text))
        column += len(text) + 5
    return keys


def _draw_piece(
    axes: Any,
    piece: Piece,
    y: float,
    token: ExplainedToken,
    names: list[str],
    known: frozenset[str],
) -> None:
    colour: Any = NONE
    if token.executed is not None:
        colour = (*_rgb(names.index(token.executed)), opacity(token))
    _box(axes, piece.column, y, len(piece.text), colour)
    text = "".join(c if c in known else "▯" for c in piece.text)
    _write(axes, piece.column, y, text, INK)


def _head(axes: Any, explanation: Explanation, keys: Sequence[Key], *, is_cut: bool) -> None:
    """The facts, the keys, and a note."""
    facts = "; ".join(f"{name} {value}" for name, value in explanation.facts.items())
    _write(axes, 0, 0.5, facts if len(facts) <= COLUMNS else facts[: COLUMNS - 1] + "…", MUTED)
    for index, key in enumerate(keys):
        _box(axes, key.column, key.line + 1.5, 2, (*_rgb(index), 0.6))
        _write(axes, key.column + 3, key.line + 1.5, key.text, INK)
    note = "darker: a higher score among this text's tokens"
    note += f"; {REPEATS}" * (len(keys) > len(COLOURS))
    cut = f"; cut after {MAX_LINES} lines, all of it is in explain.html"
    _write(axes, 0, keys[-1].line + 2.5, note + cut * is_cut, MUTED)


def _write(axes: Any, column: float, y: float, text: str, colour: str) -> None:
    """Text as it is: a dollar sign begins no formula."""
    axes.text(
        column,
        y,
        text,
        family=FONT,
        size=FONT_PT,
        color=colour,
        verticalalignment="center_baseline",
        parse_math=False,
    )


def _box(axes: Any, column: float, y: float, width: float, colour: Any) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((column, y - 0.44), width, 0.88, facecolor=colour, linewidth=0))


def _rgb(index: int) -> tuple[float, ...]:
    return tuple(int(part) / 255 for part in COLOURS[index % len(COLOURS)][0].split())


def _characters() -> frozenset[str]:
    """All that the font has."""
    from matplotlib.font_manager import findfont
    from matplotlib.ft2font import FT2Font

    return frozenset(map(chr, FT2Font(findfont(FONT)).get_charmap()))
