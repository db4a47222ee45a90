"""The input of a decoder forward.

Shape letters: T tokens in a step.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tokenrouter.types.sparse import SparseRows


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBatch:
    """The requests of a forward, for attention over one slot table. B requests, R rows of the table, N entries in one.

    Attributes:
        query_rows_T: int64, a permutation of the forward's rows: request by request, positions ascending.
        num_queries_B: int64, at least 1 each; their sum is T.
        query_start_B: int64 position of each request's first query; its queries are consecutive.
        row_B: int64 row of the request in the slot table.
        num_keys_B: int64 visible entries, the queries' own included.
        slots_RN: int64 slot table: the first ``num_keys_B`` entries of a row are visible, oldest first.
        positions_RN: int64 original positions of those entries, ascending; None when they are 0 .. N-1.
    """

    query_rows_T: Tensor
    num_queries_B: Tensor
    query_start_B: Tensor
    row_B: Tensor
    num_keys_B: Tensor
    slots_RN: Tensor
    positions_RN: Tensor | None = None


class Segment(NamedTuple):
    """Rows ``start`` to ``stop`` of a forward run on the executor called ``executor``."""

    start: int
    stop: int
    executor: str


@dataclass(frozen=True, kw_only=True, slots=True)
class KVAccess:
    """How a forward uses the slots of one layer group.

    Attributes:
        slots_T: int64 slot that each token's entry is written to.
        attention: the entries that each request's queries see.
    """

    slots_T: Tensor
    attention: AttentionBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """The input of one decoder forward: tokens sorted by route, so that every executor gets one contiguous slice.

    Attributes:
        ids_T, positions_T: int64, sorted by route.
        segments: for each layer, the segments that cover rows 0 .. T-1 in order. Equal layers share one tuple.
        kv: per layer group, where entries are written and read.
        sparse: for each layer, which rows attend sparsely, None: none of it; equal layers share one value. None: none.
    """

    ids_T: Tensor
    positions_T: Tensor
    segments: tuple[tuple[Segment, ...], ...]
    kv: tuple[KVAccess, ...]
    sparse: tuple[SparseRows | None, ...] | None = None

    def __len__(self) -> int:
        return self.ids_T.shape[0]
