"""A table as Markdown, LaTeX and CSV."""

import csv
import io
import math
from collections.abc import Callable, Mapping

from tokenrouter.evaluation.tables import markdown as padded

from .intervals import Estimate
from .spec import CSV_COLUMNS, Column
from .table import Table

VERDICT_MARKS = {"better": "↑", "worse": "↓", "tie": "="}
_LATEX_MARKS = {"better": r"$\uparrow$", "worse": r"$\downarrow$", "tie": "$=$"}
_LATEX = {
    "\\": r"\textbackslash{}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}
_MARKDOWN = {c: f"\\{c}" for c in "\\*`<"}
HUGE = 1e12
"""From here on a number is shown with its power of ten."""


def legend(table: Table) -> str:
    """What brackets and marks mean, those that are shown; empty where none is."""
    shown = [
        row.cells[c.title] for row in table.rows for c in table.columns if c.title in row.cells
    ]
    counts = {len(each.samples) > 1 for each in shown if _has_brackets(each)}
    parts = {True: "95 % over runs", False: "of the passes or windows of one run"}
    intervals = [text for is_several, text in parts.items() if is_several in counts]
    brackets = f"brackets: {'; '.join(intervals)}" if intervals else ""
    marks = ", ".join(f"{mark} {name}" for name, mark in VERDICT_MARKS.items())
    judged = any(row.verdicts for row in table.rows)
    beside = f"beside {table.spec.baseline} of the same run: {marks}" if judged else ""
    text = "; ".join(filter(None, (brackets, beside)))
    return f"{text[0].upper()}{text[1:]}." if text else ""


def markdown(table: Table) -> str:
    """GitHub's kind of table, padded so that it also reads as plain text."""
    header, lines = table_cells(table, VERDICT_MARKS, escape=_plain)
    return padded(header, lines, num_left=len(table.spec.row_labels))


def latex(table: Table) -> str:
    r"""A ``tabular`` with the rules of booktabs, for ``\input``."""
    header, lines = table_cells(table, _LATEX_MARKS, escape=_escaped)
    num_labels = len(table.spec.row_labels)
    body = [" & ".join(line) + r" \\" for line in lines]
    return "\n".join(
        [
            f"% {table.spec.title}. {legend(table)}".rstrip(),
            rf"\begin{{tabular}}{{{'l' * num_labels}{'r' * (len(header) - num_labels)}}}",
            r"\toprule",
            " & ".join(header) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def as_csv(table: Table) -> str:
    """Every number in full: a line per row and column."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*table.spec.row_labels, *CSV_COLUMNS])
    for row in table.rows:
        for column in table.columns:
            if (cell := row.cells.get(column.title)) is None:
                continue
            bounds = [repr(b) if math.isfinite(b) else "" for b in (cell.low, cell.high)]
            verdict = row.verdicts.get(column.title, "")
            writer.writerow(
                [*row.labels, column.title, repr(cell.value), *bounds, len(cell.samples), verdict]
            )
    return out.getvalue()


def table_cells(
    table: Table, marks: Mapping[str, str], escape: Callable[[str], str] = str
) -> tuple[list[str], list[list[str]]]:
    """Header and lines as text: labels first, then a number with its interval and the mark of its verdict.

    Args:
        table: whose columns hold anything.
        marks: of better, worse and tie.
        escape: of all but the marks.
    """
    header = [escape(name) for name in (*table.spec.row_labels, *(c.title for c in table.columns))]
    lines = []
    for row in table.rows:
        line = [escape(label) for label in row.labels]
        for column in table.columns:
            cell = row.cells.get(column.title)
            text = "" if cell is None else escape(_number(cell, column))
            mark = marks.get(row.verdicts.get(column.title, ""), "")
            line.append(f"{text} {mark}".rstrip())
        lines.append(line)
    return header, lines


def _number(cell: Estimate, column: Column) -> str:
    text, low, high = (_shown(value, column.digits) for value in (cell.value, cell.low, cell.high))
    return f"{text} [{low}, {high}]" if _has_brackets(cell) else text


def _has_brackets(cell: Estimate) -> bool:
    return cell.is_bounded and cell.low < cell.high


def _shown(value: float, digits: int) -> str:
    return f"{value:.{digits}e}" if abs(value) >= HUGE else f"{value:z.{digits}f}"


def _escaped(text: str) -> str:
    """For LaTeX; what follows the end of a row must not look like its argument."""
    guard = "{}" if text.startswith(("[", "*")) else ""
    return guard + "".join(_LATEX.get(c, c) for c in text)


def _plain(text: str) -> str:
    """Nothing of a text is markup; ``padded`` takes care of what ends a cell."""
    return "".join(_MARKDOWN.get(c, c) for c in text)
