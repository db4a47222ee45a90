"""Azure's LLM inference traces of 2023, code completion and conversation (Patel et al. 2024, arXiv:2311.18677)."""

import csv
import io
import reprlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tokenrouter.checks import check_count
from tokenrouter.workloads.timed import Shape
from tokenrouter.workloads.traces import TraceWorkload, at_line

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, kw_only=True)
class AzureTrace(TraceWorkload):
    """A CSV file with TIMESTAMP (ISO 8601; UTC where it names no zone), ContextTokens and GeneratedTokens."""

    def _read(self, path: Path, text: str) -> list[Shape]:
        found: list[Shape] = []
        first: datetime | None = None
        for line, row in _rows(path, text):
            with at_line(path, line):
                at = _time(row["TIMESTAMP"])
                first = first or at
                found.append(
                    Shape(
                        arrival_s=(at - first).total_seconds(),
                        prompt_tokens=_count("ContextTokens", row["ContextTokens"]),
                        output_tokens=_count("GeneratedTokens", row["GeneratedTokens"]),
                    )
                )
        return found


def _rows(path: Path, text: str) -> list[tuple[int, dict[str, str | None]]]:
    """Rows by the names of their columns, each with the number of its line; None where a row is short."""
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        names = reader.fieldnames or ()
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise ValueError(
            f"{path}, behind line {reader.line_num}: no CSV ({error}); check workload.file"
        ) from None
    with at_line(path, 1):
        if lacking := [name for name in COLUMNS if name not in names]:
            raise ValueError(f"the first line names no column {', '.join(lacking)}")
    return rows


def _count(name: str, text: str | None) -> int:
    try:
        value = int(text or "")
    except ValueError:
        raise ValueError(
            f"{name} must be an integer of at least 1, got {reprlib.repr(text)}"
        ) from None
    check_count(name, value, 1)
    return value


def _time(text: str | None) -> datetime:
    try:
        at = datetime.fromisoformat(text or "")
    except ValueError:
        raise ValueError(
            f"TIMESTAMP must be a time such as 2023-11-16 18:17:03.97, got {reprlib.repr(text)}"
        ) from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)
