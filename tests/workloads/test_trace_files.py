"""Guards against a reader that changes the published traces."""

import csv
import json
import os
from datetime import datetime
from pathlib import Path

import pytest

from tokenrouter.workloads import AzureTrace, MooncakeTrace

pytestmark = pytest.mark.data
TEXT = [3 + (i * i + i // 7) % 49_000 for i in range(60_000)]
NUM, START = 60, 1000


@pytest.fixture(scope="module")
def data_dir() -> Path:
    """The folder of local data sets."""
    folder = os.environ.get("TOKENROUTER_DATA_DIR")
    if not folder:
        pytest.skip("TOKENROUTER_DATA_DIR is not set: no folder of local data sets")
    return Path(folder)


@pytest.mark.parametrize("kind", ["code", "conv"])
def test_azure_lengths_and_gaps_are_unchanged(kind: str, data_dir: Path) -> None:
    file = f"trace_azure2023_{kind}/AzureLLMInferenceTrace_{kind}.csv"
    with (data_dir / file).open(newline="") as lines:
        rows = list(csv.DictReader(lines))[START : START + NUM]
    trace = AzureTrace(data_dir=str(data_dir), file=file, num_requests=NUM, start=START)
    built = trace.build(list, TEXT)
    assert [(len(r.prompt_ids), r.max_output_tokens) for r in built.requests] == [
        (int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows
    ]
    times = [datetime.strptime(row["TIMESTAMP"][:26], "%Y-%m-%d %H:%M:%S.%f") for row in rows]
    expected = [(at - times[0]).total_seconds() for at in times]
    assert [r.arrival_s for r in built.requests] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("kind", "start"), [("conversation", 1000), ("synthetic", 2400)])
def test_mooncake_blocks_are_equal_where_hash_ids_are_and_only_there(
    kind: str, start: int, data_dir: Path
) -> None:
    """Two ids that got the same passage by chance are a shared prefix that the trace does not have."""
    file = f"trace_mooncake_{kind}/{kind}_trace.jsonl"
    lines = (data_dir / file).read_text().splitlines()[start : start + NUM]
    rows = [json.loads(line) for line in lines]
    trace = MooncakeTrace(
        data_dir=str(data_dir), file=file, num_requests=NUM, start=start, length_scale=0.125
    )
    built = trace.build(list, TEXT)
    blocks: dict[int, tuple[int, ...]] = {}
    num_shared = 0
    for request, row in zip(built.requests, rows, strict=True):
        ids = request.prompt_ids
        assert len(ids) == max(1, round(row["input_length"] / 8))
        for index, hash_id in enumerate(row["hash_ids"][: len(ids) // 64]):
            block = ids[64 * index : 64 * (index + 1)]
            num_shared += hash_id in blocks
            assert blocks.setdefault(hash_id, block) == block
    assert num_shared > 10 and len(set(blocks.values())) == len(blocks)
