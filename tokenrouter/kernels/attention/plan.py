"""The plan of reference attention: which ``scaled_dot_product_attention`` calls cover a forward's queries.

Q queries of one request, K its visible entries, B requests of a decode group, S slots. A request whose slots lie in a
row is read in place. Other requests are gathered; decode queries of similar length share one gather and one call,
padded with the null slot, so content of slots that are not the request's own is never read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenrouter.kernels.checks import check_plan
from tokenrouter.types import AttentionBatch, SparseAttention, SparseRows

GROUP_WASTE_KEYS = 400  # padding that costs as much as one more call
IN_PLACE_MIN_KEYS = 384  # from here on reading in place saves more than a call of its own costs


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One request's part of a forward.

    ``query_index_Q`` are its rows of the forward, ``slots_K`` its visible entries, ``key_positions_K`` their positions
    (None: 0 .. K-1), ``first_slot`` the first slot when they lie in a row, else -1, ``num_observed`` its last queries
    that report, ``sparse_Q`` those queries (int64, from 0) that are sparse and may not see everything.
    """

    query_index_Q: Tensor
    query_start: int
    slots_K: Tensor
    key_positions_K: Tensor | None
    first_slot: int
    num_observed: int
    sparse_Q: Tensor

    @property
    def positions_K(self) -> Tensor:
        """Of its entries, int64."""
        if self.key_positions_K is None:
            return torch.arange(len(self.slots_K), device=self.slots_K.device)
        return self.key_positions_K


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One ``scaled_dot_product_attention`` call: B requests with Q queries and K keys each.

    ``slots`` is an int64 tensor ``[B * K]`` or a slice of the arena; ``bias`` broadcasts to ``[B, 1, Q, K]``: 0 where a
    key is visible, -inf where not.
    """

    rows: Tensor | slice
    slots: Tensor | slice
    batch: int
    bias: Tensor | None
    causal: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferencePlan:
    """The calls that cover every query of a forward once; ``in_order`` when their rows follow each other from 0.

    It is for an arena of ``num_full`` entries and ``num_int8`` in int8, and holds nothing of the batch's tensors.
    """

    calls: tuple[Call, ...]
    spans: tuple[Span, ...]
    scale: float
    in_order: bool
    window: int | None
    num_full: int
    num_int8: int
    sparse: SparseAttention | None = None

    @property
    def num_blocks(self) -> int:
        """None: mean keys are found anew."""
        return 0

    @property
    def received_size(self) -> int:
        """Visible entries of all requests."""
        return sum(span.slots_K.shape[0] for span in self.spans)


def plan(
    batch: AttentionBatch,
    *,
    num_slots: int,
    scale: float,
    dtype: torch.dtype,
    window: int | None = None,
    num_observed_B: Tensor | None = None,
    num_int8: int = 0,
    sparse: SparseRows | None = None,
) -> ReferencePlan:
    """Groups the requests of ``batch`` into calls; arguments and errors as in ``KernelSet.plan_attention``."""
    check_plan(window, num_slots, num_int8, sparse)
    num_full = num_slots - num_int8
    spans = _spans(batch, num_observed_B, num_full, sparse)
    dense = [span for span in spans if not len(span.sparse_Q)]
    calls = [_single(span, window, dtype) for span in dense if _runs_alone(span)]
    decode = [span for span in dense if not _runs_alone(span)]
    decode.sort(key=lambda span: -span.slots_K.shape[0])
    start, waste = 0, 0
    for end in range(1, len(decode) + 1):
        if end < len(decode):
            waste += decode[start].slots_K.shape[0] - decode[end].slots_K.shape[0]
        if end == len(decode) or waste > GROUP_WASTE_KEYS:
            calls.append(_decode_group(decode[start:end], num_full - 1, window, dtype))
            start, waste = end, 0
    calls.sort(key=lambda call: call.rows.start if isinstance(call.rows, slice) else -1)
    return ReferencePlan(
        calls=tuple(calls),
        spans=tuple(spans),
        scale=scale,
        in_order=len(dense) == len(spans) and _covers_in_order(calls),
        window=window,
        num_full=num_full,
        num_int8=num_int8,
        sparse=sparse.spec if sparse else None,
    )


def _spans(
    batch: AttentionBatch, num_observed_B: Tensor | None, num_full: int, sparse: SparseRows | None
) -> list[Span]:
    spans, offset, query_rows_T = [], 0, batch.query_rows_T.clone()
    observed_B = torch.zeros_like(batch.row_B) if num_observed_B is None else num_observed_B
    for queries, start, row, keys, observed in zip(
        batch.num_queries_B.tolist(),
        batch.query_start_B.tolist(),
        batch.row_B.tolist(),
        batch.num_keys_B.tolist(),
        observed_B.tolist(),
        strict=True,
    ):
        slots_K = batch.slots_RN[row, :keys].clone()
        positions_RN = batch.positions_RN
        index_Q = query_rows_T[offset : offset + queries]
        spans.append(
            Span(
                query_index_Q=index_Q,
                query_start=start,
                slots_K=slots_K,
                key_positions_K=None if positions_RN is None else positions_RN[row, :keys].clone(),
                first_slot=_first_of_run(slots_K, num_full),
                num_observed=min(observed, queries),
                sparse_Q=_limited(index_Q, start, sparse),
            )
        )
        offset += queries
    return spans


def _limited(index_Q: Tensor, query_start: int, sparse: SparseRows | None) -> Tensor:
    """The queries that are sparse and may not see everything."""
    if sparse is None:
        return index_Q[:0]
    positions_Q = torch.arange(query_start, query_start + len(index_Q), device=index_Q.device)
    is_limited_Q = positions_Q >= sparse.spec.first_limited
    return (sparse.is_sparse_T[index_Q] & is_limited_Q).nonzero().flatten()


def _first_of_run(slots_K: Tensor, num_full: int) -> int:
    """The first slot when they are consecutive and full, else -1."""
    if not len(slots_K):
        return -1
    first, last = int(slots_K[0]), int(slots_K[-1])
    in_a_row = last - first + 1 == len(slots_K) and bool((slots_K.diff() == 1).all())
    return first if in_a_row and last < num_full else -1


def _runs_alone(span: Span) -> bool:
    """Prefill chunks, and long decode contexts that lie in a row."""
    long_run = span.first_slot >= 0 and span.slots_K.shape[0] >= IN_PLACE_MIN_KEYS
    return len(span.query_index_Q) > 1 or long_run


def _covers_in_order(calls: Sequence[Call]) -> bool:
    """Whether the calls' rows are slices that follow each other (``plan`` has sorted them)."""
    end = 0
    for call in calls:
        if not isinstance(call.rows, slice) or call.rows.start != end:
            return False
        end = call.rows.stop
    return True


def _rows(index_Q: Tensor) -> Tensor | slice:
    first, last = int(index_Q[0]), int(index_Q[-1])
    consecutive = last - first + 1 == len(index_Q) and bool((index_Q.diff() == 1).all())
    return slice(first, last + 1) if consecutive else index_Q


def _single(span: Span, window: int | None, dtype: torch.dtype) -> Call:
    num_queries, num_keys = span.query_index_Q.shape[0], span.slots_K.shape[0]
    in_place = span.first_slot >= 0
    square = num_queries == num_keys and span.query_start == 0 and window is None
    causal = square and _last_position(span) == num_keys - 1
    mask = None if causal else visible(span, window)
    return Call(
        rows=_rows(span.query_index_Q),
        slots=slice(span.first_slot, span.first_slot + num_keys) if in_place else span.slots_K,
        batch=1,
        bias=None if mask is None else _bias(mask, dtype),
        causal=causal,
    )


def visible(span: Span, window: int | None) -> Tensor | None:
    """Visible keys per query ``[Q, K]``, or None when every key is visible to every query."""
    num_queries = span.query_index_Q.shape[0]
    in_window = window is None or span.query_start < window
    if num_queries == 1 and in_window and _last_position(span) <= span.query_start:
        return None
    device = span.slots_K.device
    key_K = span.positions_K
    query_Q1 = torch.arange(span.query_start, span.query_start + num_queries, device=device)[
        :, None
    ]
    mask = key_K <= query_Q1
    return mask if window is None else mask & (query_Q1 - key_K < window)


def _last_position(span: Span) -> int:
    """Of its entries; -1 where it has none."""
    if span.key_positions_K is None or not len(span.slots_K):
        return len(span.slots_K) - 1
    return int(span.key_positions_K[-1])


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where ``mask`` is True, -inf where not: scores take it without a conversion per layer."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        ~mask, float("-inf")
    )


def _decode_group(
    group: Sequence[Span], null_slot: int, window: int | None, dtype: torch.dtype
) -> Call:
    lengths = [span.slots_K.shape[0] for span in group]
    slots_BK = torch.nn.utils.rnn.pad_sequence(
        [span.slots_K for span in group], batch_first=True, padding_value=float(null_slot)
    )
    masks = [visible(span, window) for span in group]
    bias = None
    if min(lengths) < max(lengths) or any(mask is not None for mask in masks):
        device = slots_BK.device
        mask_BK = (
            torch.arange(max(lengths), device=device)
            < torch.tensor(lengths, device=device)[:, None]
        )
        for row, mask in enumerate(masks):
            if mask is not None:
                mask_BK[row, : lengths[row]] &= mask[0]
        bias = _bias(mask_BK[:, None, None, :], dtype)
    index_B = torch.cat([span.query_index_Q for span in group])
    return Call(
        rows=_rows(index_B), slots=slots_BK.flatten(), batch=len(group), bias=bias, causal=False
    )
