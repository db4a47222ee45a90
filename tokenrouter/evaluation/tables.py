"""The one table of a run: markdown that also reads as plain text."""

from collections.abc import Callable, Sequence

from tokenrouter.evaluation.rows import SystemRow
from tokenrouter.telemetry import Spread

Column = tuple[str, Callable[[SystemRow], str]]


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "" if value is None else f"{scale * value:.{digits}f}"


def _spread(value: Spread | None) -> str:
    if value is None:
        return ""
    return f"{value.median:.1f} [{value.min:.1f}, {value.max:.1f}]"


COLUMNS: tuple[Column, ...] = (
    ("system", lambda row: f"**{row.name}**" if row.chosen else row.name),
    ("KL mnat", lambda row: _number(row.kl_mean_nats, 3, 1e3)),
    ("KL decode", lambda row: _number(row.kl_decode_nats, 3, 1e3)),
    ("ppl %", lambda row: "" if row.ppl_rel_pct is None else f"{row.ppl_rel_pct:+.2f}"),
    ("top-1 %", lambda row: _number(row.top1_agreement_frac, 1, 1e2)),
    ("high %, text", lambda row: _number(row.eval_high_frac, 1, 1e2)),
    ("high %, text decode", lambda row: _number(row.eval_decode_high_frac, 1, 1e2)),
    ("high %, requests", lambda row: _number(row.high_frac, 1, 1e2)),
    ("output tok/s [min, max]", lambda row: _spread(row.output_tok_s)),
    ("goodput %", lambda row: _number(row.goodput_frac, 1, 1e2)),
    ("TTFT p99 ms", lambda row: _number(row.ttft_p99_ms, 0)),
    ("ITL p99 ms", lambda row: _number(row.itl_p99_ms, 0)),
    ("KV peak MB", lambda row: _number(row.kv_peak_live_bytes, 1, 1e-6)),
)


def table_columns(rows: Sequence[SystemRow]) -> dict[str, list[str]]:
    """By title the cells of each column that holds anything, in the order of ``rows``."""
    cells = {title: [cell(row) for row in rows] for title, cell in COLUMNS}
    return {title: column for title, column in cells.items() if any(column)}


def format_table(rows: Sequence[SystemRow], notes: Sequence[str]) -> str:
    """Rows with the columns that hold anything, then the notes, one line each."""
    cells = table_columns(rows)
    widths = {title: max(map(len, (title, *column))) for title, column in cells.items()}
    first = next(iter(cells))

    def line(values: dict[str, str]) -> str:
        padded = (
            v.ljust(widths[t]) if t == first else v.rjust(widths[t]) for t, v in values.items()
        )
        return "| " + " | ".join(padded) + " |"

    rule = {
        title: "-" * (width if title == first else width - 1) + ("" if title == first else ":")
        for title, width in widths.items()
    }
    lines = [line({title: title for title in cells}), line(rule)]
    lines += [line({title: column[i] for title, column in cells.items()}) for i in range(len(rows))]
    return "\n".join([*lines, "", *notes]) + "\n"
