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
}


def legend(table: Table) -> str:
    """What brackets and marks mean."""
    counts = {len(e.samples) > 1 for row in table.rows for e in row.cells.values()}
    parts = {True: "95 % over runs", False: "of the passes or windows of one run"}
    interval = "; ".join(text for is_several, text in parts.items() if is_several in counts)
    marks = ", ".join(f"{mark} {name}" for name, mark in VERDICT_MARKS.items())
    judged = any(row.verdicts for row in table.rows)
    beside = f"; beside {table.spec.baseline} of the same run: {marks}" if judged else ""
    return f"Brackets: {interval}{beside}."


def markdown(table: Table) -> str:
    """GitHub's kind of table, padded so that it also reads as plain text."""
    header, lines = table_cells(table, VERDICT_MARKS)
    return padded(header, lines, num_left=len(table.spec.row_labels))


def latex(table: Table) -> str:
    r"""A ``tabular`` with the rules of booktabs, for ``\input``."""
    header, lines = table_cells(table, _LATEX_MARKS, escape=_escaped)
    num_labels = len(table.spec.row_labels)
    body = [" & ".join(line) + r" \\" for line in lines]
    return "\n".join(
        [
            f"% {table.spec.title}. {legend(table)}",
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
    digits = column.digits
    text = f"{cell.value:.{digits}f}"
    if not cell.is_bounded or cell.low == cell.high:
        return text
    return f"{text} [{cell.low:.{digits}f}, {cell.high:.{digits}f}]"


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in text)
