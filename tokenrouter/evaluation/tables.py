"""Tables of a run: markdown that also reads as plain text."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from tokenrouter.evaluation.rows import SystemRow
from tokenrouter.telemetry import Spread

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Column = tuple[str, Callable[[SystemRow], str]]


def number(value: float | None, digits: int, scale: float = 1.0) -> str:
    """``value`` times ``scale`` with so many digits behind the point; empty for None."""
    return "" if value is None else f"{scale * value:.{digits}f}"


def _spread(value: Spread | None) -> str:
    if value is None:
        return ""
    return f"{value.median:.1f} [{value.min:.1f}, {value.max:.1f}]"


COLUMNS: tuple[Column, ...] = (
    ("system", lambda row: f"**{row.name}**" if row.chosen else row.name),
    ("KL mnat", lambda row: number(row.kl_mean_nats, 3, 1e3)),
    ("KL decode", lambda row: number(row.kl_decode_nats, 3, 1e3)),
    ("ppl %", lambda row: "" if row.ppl_rel_pct is None else f"{row.ppl_rel_pct:+.2f}"),
    ("top-1 %", lambda row: number(row.top1_agreement_frac, 1, 1e2)),
    ("high %, text", lambda row: number(row.eval_high_frac, 1, 1e2)),
    ("high %, text decode", lambda row: number(row.eval_decode_high_frac, 1, 1e2)),
    ("high %, requests", lambda row: number(row.high_frac, 1, 1e2)),
    ("same text %", lambda row: number(row.same_output_frac, 0, 1e2)),
    ("same tokens", lambda row: number(row.common_tokens_mean, 1)),
    ("chrF", lambda row: number(row.chrf, 1)),
    ("length", lambda row: number(row.length_ratio, 2)),
    ("output tok/s [min, max]", lambda row: _spread(row.output_tok_s)),
    ("goodput %", lambda row: number(row.goodput_frac, 1, 1e2)),
    ("TTFT p99 ms", lambda row: number(row.ttft_p99_ms, 0)),
    ("ITL p99 ms", lambda row: number(row.itl_p99_ms, 0)),
    ("KV peak MB", lambda row: number(row.kv_peak_live_bytes, 1, 1e-6)),
)


def table_columns(rows: Sequence[SystemRow]) -> dict[str, list[str]]:
    """By title the cells of each column that holds anything, in the order of ``rows``."""
    cells = {title: [cell(row) for row in rows] for title, cell in COLUMNS}
    return {title: column for title, column in cells.items() if any(column)}


def with_error(value: float | None, error: float | None, *, sign: bool = False) -> str:
    """``value`` with its standard error, where there is one; empty for None."""
    if value is None:
        return ""
    shown = f"{value + 0.0:{'+' if sign else ''}.1f}"
    return shown if error is None else f"{shown} ± {error:.1f}"


def p_value(value: float | None) -> str:
    """Three digits behind the point, or that it is smaller; empty for None."""
    return "<0.001" if value is not None and value < 0.0005 else number(value, 3)


def format_table(
    rows: Sequence[SystemRow], notes: Sequence[str], others: Sequence[str] = ()
) -> str:
    """Rows with the columns that hold anything, then other tables, then the notes, one line each."""
    columns = table_columns(rows)
    table = markdown(list(columns), list(zip(*columns.values(), strict=True)))
    return "\n".join([table, *others, *notes]) + "\n"


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int = 1) -> str:
    """A table in columns of equal width that ends with a line break; those that are empty in all rows are left out.

    Args:
        titles: of the columns.
        rows: per row its cells.
        num_left: so many first columns are aligned to the left, the others to the right.

    Returns:
        The text; empty where no cell holds anything.
    """
    lines: list[list[str]] = [[] for _ in range(len(rows) + 2)]
    for index, column in enumerate(zip(titles, *rows, strict=True)):
        if not any(column[1:]):
            continue
        title, *cells = map(_in_a_cell, column)
        width, is_left = max(2, *map(len, (title, *cells))), index < num_left
        rule = "-" * width if is_left else "-" * (width - 1) + ":"
        for line, cell in zip(lines, (title, rule, *cells), strict=True):
            line.append(cell.ljust(width) if is_left else cell.rjust(width))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines if line)


def _in_a_cell(text: str) -> str:
    """On one line, without what ends a cell."""
    return " ".join(text.splitlines()).replace("|", "\\|")


def as_csv(kind: "type[DataclassInstance]", rows: "Sequence[DataclassInstance]") -> str:
    """Rows of one dataclass as CSV with its fields as the header; None is empty."""
    text = io.StringIO()
    names = [column.name for column in fields(kind)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()
