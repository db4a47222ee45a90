"""The decision log: one row per decided token, written as parquet.

The engine hands over one block of columns per step; names stay indices until here, so that logging
costs a step as little as possible.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenrouter.types import Phase

Block = Mapping[str, npt.NDArray[Any]]

COLUMNS = (
    "request_id",
    "position",
    "token_id",
    "phase",
    "requested",
    "executed",
    "score",
    "reason",
)
_SOURCE = (
    "request_index",
    "position",
    "token_id",
    "phase",
    "requested",
    "executed",
    "score",
    "reason",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionLog:
    """Blocks of equally long 1-D columns and the names that their indices point to.

    Attributes:
        blocks: one per step, with the keys request_index, position, token_id, phase, requested,
            executed, score, reason.
        request_ids: what ``request_index`` points to.
        route_names: what ``requested`` and ``executed`` point to.
        reasons: what ``reason`` points to.
        router, router_version: kept in the file's metadata.
    """

    blocks: Sequence[Block]
    request_ids: Sequence[str]
    route_names: Sequence[str]
    reasons: Sequence[str]
    router: str = ""
    router_version: str = ""


def write_decisions(path: Path, log: DecisionLog) -> int:
    """Write ``log`` as parquet (``COLUMNS``, names as dictionaries); returns the number of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = {name: _column(log.blocks, name) for name in _SOURCE}
    names = {
        "request_index": log.request_ids,
        "phase": [phase.name.lower() for phase in Phase],
        "requested": log.route_names,
        "executed": log.route_names,
        "reason": log.reasons,
    }
    arrays: list[Any] = []
    for source in _SOURCE:
        values = column[source]
        if source in names:
            words = pa.array(list(names[source]), type=pa.string())
            arrays.append(pa.DictionaryArray.from_arrays(pa.array(values.astype(np.int32)), words))
        elif source == "score":
            arrays.append(pa.array(values.astype(np.float32)))
        else:
            arrays.append(pa.array(values.astype(np.int32)))
    metadata = {"router": log.router, "router_version": log.router_version}
    table = pa.table(arrays, names=list(COLUMNS)).replace_schema_metadata(metadata)
    pq.write_table(table, path, compression="zstd")
    return int(table.num_rows)


def _column(blocks: Sequence[Block], name: str) -> npt.NDArray[Any]:
    missing = [index for index, block in enumerate(blocks) if name not in block]
    if missing:
        raise ValueError(
            f"decision block {missing[0]} has no column {name!r}; "
            f"it has: {', '.join(blocks[missing[0]])}"
        )
    return (
        np.concatenate([np.asarray(block[name]) for block in blocks])
        if blocks
        else np.zeros(0, dtype=np.int64)
    )
