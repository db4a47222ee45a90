"""Azure's LLM inference traces of 2023, code completion and conversation (Patel et al. 2024, arXiv:2311.18677)."""

import csv
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tokenrouter.workloads.timed import Shape
from tokenrouter.workloads.traces import TraceWorkload


@dataclass(frozen=True, kw_only=True)
class AzureTrace(TraceWorkload):
    """A CSV file with TIMESTAMP, ContextTokens and GeneratedTokens."""

    def _read(self, path: Path) -> list[Shape]:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        times = [datetime.fromisoformat(row["TIMESTAMP"]) for row in rows]
        return [
            Shape(
                arrival_s=(at - times[0]).total_seconds(),
                prompt_tokens=int(row["ContextTokens"]),
                output_tokens=int(row["GeneratedTokens"]),
            )
            for at, row in zip(times, rows, strict=True)
        ]
