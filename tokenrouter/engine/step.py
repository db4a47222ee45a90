"""From a plan to tensors: the packed tokens of a step, and the forwards that run them.

T tokens of a step in plan order, C chunks, B requests of a forward, R rows of a slot table, N tokens of one request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenrouter.kvcache import KVPool, SlotTable
from tokenrouter.scheduler import Chunk, StepPlan
from tokenrouter.types import (
    AttentionBatch,
    ForwardBatch,
    KVAccess,
    Phase,
    Route,
    RouteTable,
    Segment,
    TokenBatch,
)

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedStep:
    """The tokens of a plan, request by request.

    Attributes:
        chunks: the plan's chunks; chunk c holds tokens ``offsets_C[c]`` to ``offsets_C[c + 1]``.
        requested_T: the recorded decision per token, UNDECIDED where there is none.
    """

    batch: TokenBatch
    chunks: tuple[Chunk, ...]
    offsets_C: tuple[int, ...]
    requested_T: IntArray

    def tokens(self, chunk: int) -> slice:
        """Where chunk number ``chunk`` lies in the batch."""
        return slice(self.offsets_C[chunk], self.offsets_C[chunk + 1])

    def index(self, chunks: Sequence[int]) -> IntArray:
        """Where the tokens of ``chunks`` lie in the batch, chunk by chunk."""
        return np.concatenate([np.arange(*self.offsets_C[c : c + 2]) for c in chunks])


def pack(plan: StepPlan) -> PackedStep:
    """Lays the plan's tokens side by side."""
    spans = [
        (chunk.request, slice(chunk.start, chunk.start + chunk.length)) for chunk in plan.chunks
    ]
    lengths = [chunk.length for chunk in plan.chunks]
    positions_T = np.concatenate([np.arange(span.start, span.stop) for _, span in spans])
    prompt_len_T = np.repeat([request.prompt_len for request, _ in spans], lengths)
    phase_T = np.where(positions_T < prompt_len_T, int(Phase.PREFILL), int(Phase.DECODE))
    batch = TokenBatch(
        ids_T=torch.from_numpy(
            np.concatenate([request.history.ids[span] for request, span in spans])
        ),
        positions_T=torch.from_numpy(positions_T),
        row_T=torch.from_numpy(np.repeat([request.row for request, _ in spans], lengths)),
        phase_T=torch.from_numpy(phase_T),
        prompt_len_T=torch.from_numpy(prompt_len_T),
        repeats_T=torch.from_numpy(
            np.concatenate([request.history.repeats[span] for request, span in spans])
        ),
        prefix_hash_T=torch.from_numpy(
            np.concatenate([request.history.prefix_hash[span] for request, span in spans])
        ),
    )
    return PackedStep(
        batch=batch,
        chunks=plan.chunks,
        offsets_C=(0, *np.cumsum(lengths).tolist()),
        requested_T=np.concatenate([request.requested_N[span] for request, span in spans]).astype(
            np.int64
        ),
    )


class ForwardBuilder:
    """Turns chunks into a ForwardBatch: tokens sorted by route, slices per executor, a KVAccess per layer group."""

    def __init__(self, table: RouteTable, num_layers: int, pool: KVPool) -> None:
        """Reads ``pool``'s slot tables, one per layer group, whenever it builds; changes none."""
        self._tables = pool.tables
        # Per layer, the executor of each route; equal layers share one entry, so segments are built once per pattern.
        self._patterns: list[tuple[str, ...]] = [
            tuple(_executor_at(route, layer) for route in table.routes)
            for layer in range(num_layers)
        ]

    def build(
        self, step: PackedStep, chunks: Sequence[int], executed_T: IntArray
    ) -> tuple[ForwardBatch, Tensor]:
        """The forward of ``chunks`` and the rows of their tokens, in the order of ``chunks``.

        Returns:
            The ForwardBatch, and int64 rows: entry i is the forward's row of the i-th token of the group.
        """
        index_T = step.index(chunks)
        parts = [step.chunks[c] for c in chunks]
        num_queries_B = np.array([part.length for part in parts])
        start_B = np.array([part.start for part in parts])
        row_B = np.array([part.request.row for part in parts])
        stop_B = start_B + num_queries_B
        route_T = executed_T[index_T]
        # By route, so that executors get slices; within a route the longest context first, so that attention's groups
        # of similar length are slices too.
        order_T = np.lexsort((-np.repeat(stop_B, num_queries_B), route_T))
        row_T = np.empty_like(order_T)
        row_T[order_T] = np.arange(len(order_T))
        sorted_T = torch.from_numpy(index_T[order_T])
        rows = torch.from_numpy(row_T)
        positions_T = step.batch.positions_T[sorted_T]
        spans = _Spans(
            rows_T=rows,
            row_B=torch.from_numpy(row_B),
            start_B=torch.from_numpy(start_B),
            num_queries_B=torch.from_numpy(num_queries_B),
        )
        row_T = step.batch.row_T[sorted_T].numpy()
        forward = ForwardBatch(
            ids_T=step.batch.ids_T[sorted_T],
            positions_T=positions_T,
            segments=self._segments(np.bincount(route_T).tolist()),
            kv=tuple(_access(table, spans, row_T, positions_T.numpy()) for table in self._tables),
        )
        return forward, rows

    def _segments(self, counts: list[int]) -> tuple[tuple[Segment, ...], ...]:
        built: dict[tuple[str, ...], tuple[Segment, ...]] = {}
        for pattern in self._patterns:
            if pattern not in built:
                built[pattern] = _merge(counts, pattern)
        return tuple(built[pattern] for pattern in self._patterns)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Spans:
    """The requests of a forward: ``num_queries_B`` tokens each from position ``start_B`` on, in rows ``rows_T``."""

    rows_T: Tensor
    row_B: Tensor
    start_B: Tensor
    num_queries_B: Tensor


def _access(table: SlotTable, spans: _Spans, row_T: IntArray, positions_T: IntArray) -> KVAccess:
    """Slots and visible entries in one layer group.

    No token at or behind the first that is still to be computed is ever evicted, so the entry of position p is number
    p less the row's evicted ones.
    """
    evicted_R = table.num_seen_R - table.num_kept_R
    evicted_B = torch.from_numpy(evicted_R[spans.row_B.numpy()])
    return KVAccess(
        slots_T=torch.from_numpy(table.slots_RN[row_T, positions_T - evicted_R[row_T]]),
        attention=AttentionBatch(
            query_rows_T=spans.rows_T,
            num_queries_B=spans.num_queries_B,
            query_start_B=spans.start_B,
            row_B=spans.row_B,
            num_keys_B=spans.start_B + spans.num_queries_B - evicted_B,
            slots_RN=torch.from_numpy(table.slots_RN),
            positions_RN=torch.from_numpy(table.positions_RN) if bool(evicted_B.any()) else None,
        ),
    )


def _executor_at(route: Route, layer: int) -> str:
    return next(span.executor for span in route.spans if layer < span.stop)


def _merge(counts: list[int], pattern: tuple[str, ...]) -> tuple[Segment, ...]:
    """Neighbouring routes that use the same executor share one segment."""
    merged: list[Segment] = []
    start = 0
    for count, name in zip(counts, pattern, strict=False):
        if count and merged and merged[-1].executor == name:
            merged[-1] = Segment(merged[-1].start, start + count, name)
        elif count:
            merged.append(Segment(start, start + count, name))
        start += count
    return tuple(merged)
