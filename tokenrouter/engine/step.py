"""From a plan to tensors: the packed tokens of a step, and the forwards that run them.

T tokens of a step in plan order, C chunks, B requests of a forward, R rows of a slot table, N tokens of one request.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenrouter.kvcache import KVPool, SlotTable
from tokenrouter.scheduler import Request, StepPlan, TokenRows
from tokenrouter.types import (
    AttentionBatch,
    ForwardBatch,
    KVAccess,
    Phase,
    RouteTable,
    Segment,
    SparseAttention,
    SparseRows,
    TokenBatch,
)

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedStep:
    """The tokens of a plan, request by request.

    Attributes:
        requests: of each chunk; chunk c holds tokens ``first_C[c]`` to ``first_C[c] + length_C[c]``.
        row_C, start_C, length_C: int64, of each chunk its request's row, its first position and its tokens.
        state_C: what the requests' STATE was when the step was packed.
        is_due_C: which chunks reach their request's last token, so that its next one is due.
        is_decode_C: which of those hold nothing else, and no token of the prompt.
        requested_T: the recorded decision per token, UNDECIDED where there is none.
        tokens: where decisions are recorded.
    """

    batch: TokenBatch
    requests: tuple[Request, ...]
    row_C: IntArray
    start_C: IntArray
    length_C: IntArray
    first_C: IntArray
    state_C: NDArray[np.void]
    is_due_C: NDArray[np.bool_]
    is_decode_C: NDArray[np.bool_]
    requested_T: IntArray
    tokens: TokenRows

    def index(self, of: IntArray) -> IntArray:
        """Where the tokens of some chunks lie in the batch, chunk by chunk."""
        return ranges(self.first_C[of], self.length_C[of])

    @property
    def num_left_C(self) -> IntArray:
        """Steps that each request needs at most from this one on; generation may end before."""
        state_C = self.state_C  # a forced request's last token is fed, too
        num_tokens_C = self.tokens.history.length_R[self.row_C]
        left_C: IntArray = state_C["max_total"] - num_tokens_C + state_C["is_forced"]
        return left_C

    def record_decisions(self) -> None:
        """Keeps ``requested_T`` with the requests."""
        row_T, positions_T = self.batch.row_T.numpy(), self.batch.positions_T.numpy()
        self.tokens.requested_RN[row_T, positions_T] = self.requested_T


def pack(plan: StepPlan, tokens: TokenRows) -> PackedStep:
    """Lays the plan's tokens side by side."""
    row_C, start_C, length_C = plan.row_C, plan.start_C, plan.length_C
    state_C = tokens.state_R[row_C]
    prompt_len_C = state_C["prompt_len"]
    is_due_C = start_C + length_C == tokens.history.length_R[row_C]
    positions_T, row_T = ranges(start_C, length_C), np.repeat(row_C, length_C)
    batch = token_batch(tokens, row_T, positions_T, np.repeat(prompt_len_C, length_C))
    return PackedStep(
        batch=batch,
        requests=plan.requests,
        row_C=row_C,
        start_C=start_C,
        length_C=length_C,
        first_C=np.cumsum(length_C) - length_C,
        state_C=state_C,
        is_due_C=is_due_C,
        is_decode_C=is_due_C & (length_C == 1) & (start_C >= prompt_len_C),
        requested_T=tokens.requested_RN[row_T, positions_T].astype(np.int64),
        tokens=tokens,
    )


def token_batch(
    tokens: TokenRows, row_T: IntArray, positions_T: IntArray, prompt_len_T: IntArray
) -> TokenBatch:
    """The tokens at ``positions_T`` of the rows' requests."""
    history = tokens.history
    phase_T = np.where(positions_T < prompt_len_T, int(Phase.PREFILL), int(Phase.DECODE))
    return TokenBatch(
        ids_T=torch.from_numpy(history.ids_RN[row_T, positions_T]),
        positions_T=torch.from_numpy(positions_T),
        row_T=torch.from_numpy(row_T),
        phase_T=torch.from_numpy(phase_T),
        prompt_len_T=torch.from_numpy(prompt_len_T),
        repeats_T=torch.from_numpy(history.repeats_RN[row_T, positions_T]),
        previous_T=torch.from_numpy(_previous(history.ids_RN, row_T, positions_T)),
        turn_start_T=torch.from_numpy(history.turn_start_RN[row_T, positions_T]),
        prefix_hash_T=torch.from_numpy(history.prefix_hash_RN[row_T, positions_T]),
    )


def _previous(ids_RN: IntArray, row_T: IntArray, positions_T: IntArray) -> IntArray:
    """The id before each token, -1 at position 0."""
    previous_T: IntArray = np.where(positions_T > 0, ids_RN[row_T, positions_T - 1], -1)
    return previous_T


def ranges(start_C: IntArray, length_C: IntArray) -> IntArray:
    """``arange(start, start + length)`` of each, one after another."""
    shift_T: IntArray = np.repeat(start_C - (np.cumsum(length_C) - length_C), length_C)
    return np.arange(len(shift_T)) + shift_T


class ForwardBuilder:
    """Turns chunks into a ForwardBatch: tokens sorted by route, slices per executor, a KVAccess per layer group."""

    def __init__(
        self,
        table: RouteTable,
        num_layers: int,
        pool: KVPool,
        sparse: SparseAttention | None = None,
    ) -> None:
        """Reads ``pool``'s slot tables, one per layer group, whenever it builds; changes none.

        With ``sparse``, rows of the low path attend so.
        """
        self._tables = pool.tables
        self._sparse = sparse
        self._sparse_routes: list[tuple[bool, ...]] = [
            tuple(route.is_sparse_at(layer, ("low",)) for route in table.routes)
            for layer in range(num_layers)
        ]
        # Per layer, the executor of each route; equal layers share one entry, so segments are built once per pattern.
        self._patterns: list[tuple[str, ...]] = [
            tuple(route.executor_at(layer) for route in table.routes) for layer in range(num_layers)
        ]

    def build(
        self, step: PackedStep, of: IntArray, executed_T: IntArray
    ) -> tuple[ForwardBatch, Tensor]:
        """The forward of chunks ``of`` and the rows of their tokens, in that order.

        Returns:
            The ForwardBatch, and int64 rows: entry i is the forward's row of the i-th token of the group.
        """
        index_T = step.index(of)
        row_B, start_B, num_queries_B = step.row_C[of], step.start_C[of], step.length_C[of]
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
            sparse=self._sparse_rows(route_T[order_T], positions_T.numpy()),
        )
        return forward, rows

    def _sparse_rows(
        self, route_T: IntArray, positions_T: IntArray
    ) -> tuple[SparseRows | None, ...] | None:
        """For each layer the rows that do not see all."""
        if self._sparse is None or not (positions_T >= self._sparse.first_limited).any():
            return None
        built: dict[tuple[bool, ...], SparseRows | None] = {}
        for pattern in set(self._sparse_routes):
            is_sparse_T = np.array(pattern)[route_T] & (positions_T >= self._sparse.first_limited)
            rows = SparseRows(self._sparse, torch.from_numpy(is_sparse_T))
            built[pattern] = rows if is_sparse_T.any() else None
        return tuple(built[pattern] for pattern in self._sparse_routes)

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
