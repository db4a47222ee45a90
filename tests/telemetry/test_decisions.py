"""Guards against decisions that come back under another name, request or type."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tokenrouter.telemetry import DecisionLog, write_decisions
from tokenrouter.telemetry.decisions import COLUMNS


def _block(**changes: list[float]) -> dict[str, np.ndarray]:
    block: dict[str, list[float]] = {
        "request_index": [0, 1],
        "position": [0, 7],
        "token_id": [5, 9],
        "phase": [0, 1],
        "requested": [1, 1],
        "executed": [0, 1],
        "score": [0.25, float("nan")],
        "reason": [1, 0],
    }
    return {name: np.asarray(values) for name, values in (block | changes).items()}


def _log(blocks: list[dict[str, np.ndarray]]) -> DecisionLog:
    return DecisionLog(
        blocks=blocks,
        request_ids=["a", "b"],
        route_names=["high", "low"],
        reasons=["plain", "first positions"],
        router="rule",
        router_version="rule-1",
    )


def test_rows_keep_their_names_and_order(tmp_path: Path) -> None:
    path = tmp_path / "decisions.parquet"
    assert write_decisions(path, _log([_block(), _block(position=[1, 8])])) == 4
    table = pq.read_table(path)
    assert tuple(table.column_names) == COLUMNS
    first = table.slice(0, 1).to_pylist()[0]
    assert first == {
        "request_id": "a",
        "position": 0,
        "token_id": 5,
        "phase": "prefill",
        "requested": "low",
        "executed": "high",
        "score": 0.25,
        "reason": "first positions",
    }
    assert table.column("position").to_pylist() == [0, 7, 1, 8]
    assert np.isnan(table.column("score").to_pylist()[1])
    assert table.schema.metadata[b"router_version"] == b"rule-1"


def test_a_log_without_steps_is_an_empty_table(tmp_path: Path) -> None:
    assert write_decisions(tmp_path / "d.parquet", _log([])) == 0
    assert tuple(pq.read_table(tmp_path / "d.parquet").column_names) == COLUMNS


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    block = _block()
    del block["reason"]
    with pytest.raises(ValueError, match="block 0 has no column 'reason'"):
        write_decisions(tmp_path / "d.parquet", _log([block]))
