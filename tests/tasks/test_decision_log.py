"""Guards decisions.parquet: a task that takes ``log_decisions`` and writes none, or others' decisions."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.jobs import run_in
from tokenrouter.tasks.prepare import Setup

LOGGED = ("debug=tiny", "log_decisions=true")


def _read(folder: Path) -> tuple[dict[str, list[Any]], dict[bytes, bytes]]:
    import pyarrow.parquet as pq

    table = pq.read_table(folder / "decisions.parquet")
    return table.to_pydict(), table.schema.metadata


def test_generate_logs_the_completion(tmp_path: Path) -> None:
    """The option was taken, paid for and dropped. The last token is never fed, so nothing is decided for it."""
    run_in(tmp_path, *LOGGED, "task=generate", "prompt='a, b'", "sampling.max_tokens=6")
    columns, metadata = _read(tmp_path)
    assert columns["position"] == list(range(4 + 6 - 1))
    assert columns["phase"] == ["prefill"] * 4 + ["decode"] * 5
    assert set(columns["request_id"]) == {"0"} and metadata[b"router"] == b"rule"


def test_bisect_logs_the_whole_configuration(tmp_path: Path) -> None:
    """The pass with everything off, or all passes in one table."""
    run_in(tmp_path, *LOGGED, "task=bisect", "router.first_positions=3")
    columns, metadata = _read(tmp_path)
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert len(columns["position"]) == sum(step["decided_tokens"] for step in steps)
    assert metadata[b"router"] == b"rule"
    rows = zip(columns["position"], columns["requested"], strict=True)
    assert {route for position, route in rows if position < 3} == {"high"}
    assert "low" in columns["executed"]


@pytest.mark.parametrize("task", ["generate", "bisect"])
def test_nothing_is_logged_unasked(tmp_path: Path, task: str) -> None:
    """A bisection's engines keep their decisions anyway: for its own findings."""
    run_in(tmp_path, "debug=tiny", f"task={task}")
    assert not (tmp_path / "decisions.parquet").exists()


def test_a_comparison_logs_in_a_pass_of_its_own(tmp_path: Path, setups: list[Setup]) -> None:
    """The engines that are measured logged as well, which slowed them and kept every decision of all passes."""
    run_in(tmp_path, *LOGGED, "task=evaluate")
    [setup] = setups
    engines = [*setup.systems.llms.values(), *setup.systems.scored.values()]
    assert engines and all(llm.engine.decisions is None for llm in engines)
    columns, metadata = _read(tmp_path)
    assert set(columns["request_id"]) == {"0", "1", "2", "3"} and metadata[b"router"] == b"rule"
