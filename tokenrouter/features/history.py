"""A request's tokens so far, with the running values that features and hashed draws need.

Shape letters: N tokens of one request, T tokens of a batch, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tokenrouter.features.draws import splitmix64
from tokenrouter.features.token_types import TokenTypeTable
from tokenrouter.types import Phase, TokenBatch

IntArray = NDArray[np.int64]

_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
_BASE_INVERSE = pow(_BASE, -1, 1 << 64)
_ONE = np.uint64(1)
_START = 0xD1B54A32D192ED03


class HistoryRows:
    """Histories side by side, one in each row, so that many grow at once.

    Shape letters: R rows, N tokens of one row, C rows that are written.

    Attributes:
        ids_RN: int64; the first ``length_R`` entries of a row are valid, in all four arrays.
        repeats_RN: int64, how often the same id came earlier.
        turn_start_RN: int64, position of the last special token up to and including this one, 0 where there is none;
            -1 where special tokens are not known.
        prefix_hash_RN: int64, hash of the ids up to and including this one: a polynomial rolling hash, then
            splitmix64. Equal prefixes have equal hashes; a cache that relies on the converse must compare
            ids.
        rolling_R: uint64, the rolling hash before the finaliser.
        length_R: int64.

    Where a row is appended to, its ids are counted beside it, in two bytes (four beyond 65,535 tokens) an id, up to the
    largest id that came: memory that a row takes as it meets ids.
    """

    def __init__(self, num_rows: int, capacity: int) -> None:
        """Rows take memory as they are filled, 32 bytes a token."""
        shape = num_rows, capacity
        self.ids_RN: IntArray = np.zeros(shape, np.int64)
        self.repeats_RN: IntArray = np.zeros(shape, np.int64)
        self.turn_start_RN: IntArray = np.zeros(shape, np.int64)
        self.prefix_hash_RN: IntArray = np.zeros(shape, np.int64)
        self.rolling_R: NDArray[np.uint64] = np.zeros(num_rows, np.uint64)
        self.length_R: IntArray = np.zeros(num_rows, np.int64)
        self._count_RV = np.zeros((num_rows, 0), np.uint16 if capacity < 2**16 else np.uint32)
        self._is_counted_R = np.zeros(num_rows, np.bool_)

    def append(self, row_C: IntArray, ids_C: IntArray, starts_turn_C: NDArray[np.bool_]) -> None:
        """Adds a token to each of the rows, which must have room; ``starts_turn_C``: whether it is a special one."""
        for row in row_C[~self._is_counted_R[row_C]].tolist():
            self._count(row)
        self._make_room(int(ids_C.max(initial=-1)))
        at_C, count_C = self.length_R[row_C], self._count_RV[row_C, ids_C]
        self._count_RV[row_C, ids_C] = count_C + 1
        rolling_C = self.rolling_R[row_C] * np.uint64(_BASE) + ids_C.astype(np.uint64) + _ONE
        last_C = self.turn_start_RN[row_C, at_C - 1]
        self.repeats_RN[row_C, at_C] = count_C
        self.ids_RN[row_C, at_C] = ids_C
        self.turn_start_RN[row_C, at_C] = np.where((last_C >= 0) & starts_turn_C, at_C, last_C)
        self.prefix_hash_RN[row_C, at_C] = splitmix64(rolling_C).view(np.int64)
        self.rolling_R[row_C] = rolling_C
        self.length_R[row_C] = at_C + 1

    def take(self, row: int, source: "HistoryRows", source_row: int) -> None:
        """Copies a row of ``source``."""
        n = int(source.length_R[source_row])
        if self._is_counted_R[row]:
            self._count_RV[row, self.ids_RN[row, : self.length_R[row]]] = 0
            self._is_counted_R[row] = False
        for mine, other in zip(self._columns(), source._columns(), strict=True):
            mine[row, :n] = other[source_row, :n]
        self.rolling_R[row], self.length_R[row] = source.rolling_R[source_row], n

    def _count(self, row: int) -> None:
        n = int(self.length_R[row])
        ids_N = self.ids_RN[row, :n]
        self._make_room(int(ids_N.max()))
        self._count_RV[row, ids_N] = self.repeats_RN[row, :n] + 1  # of equal ids, the last one's
        self._is_counted_R[row] = True

    def _make_room(self, token_id: int) -> None:
        """For the counts of ids up to this one."""
        num_rows, num_ids = self._count_RV.shape
        if token_id >= num_ids:  # rows that are not counted hold zeros, and stay without memory
            shape = num_rows, 1 << token_id.bit_length()
            count_RV, of = np.zeros(shape, self._count_RV.dtype), np.flatnonzero(self._is_counted_R)
            count_RV[of, :num_ids] = self._count_RV[of]
            self._count_RV = count_RV

    def _columns(self) -> tuple[IntArray, ...]:
        return self.ids_RN, self.repeats_RN, self.turn_start_RN, self.prefix_hash_RN


class TokenHistory:
    """Ids, repeats, turns and prefix hashes of one request; appending equals building from scratch.

    It lives in a row of HistoryRows: one of its own, or one beside others.

    Args:
        prompt_ids: the tokens that it begins with, at least one.
        capacity: the most tokens that it will hold.
        is_special_V: bool, which ids begin a turn; None: not known, and no turns are.

    Raises:
        ValueError: the prompt is empty, longer than ``capacity``, or holds a negative id.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        capacity: int,
        is_special_V: NDArray[np.bool_] | None = None,
    ) -> None:
        prompt_N = np.asarray(prompt_ids, dtype=np.int64)
        n = len(prompt_N)
        if not 1 <= n <= capacity:
            raise ValueError(f"a prompt of {n} tokens does not fit: 1 to {capacity} are allowed")
        if prompt_N.min() < 0:
            raise ValueError(f"token ids must not be negative, got {prompt_N.min()}")
        self.capacity = capacity
        self._is_special_V = is_special_V
        self._rows, self._row = HistoryRows(1, capacity), 0
        rolling_N = _rolling_hash(prompt_N)
        self.ids[:n] = prompt_N
        self.repeats[:n] = _earlier_occurrences(prompt_N)
        self.turn_start[:n] = -1
        if is_special_V is not None:
            starts_N = np.where(is_special_V[prompt_N], np.arange(n), 0)
            self.turn_start[:n] = np.maximum.accumulate(starts_N)
        self.prefix_hash[:n] = splitmix64(rolling_N).view(np.int64)
        self._rows.rolling_R[0], self._rows.length_R[0] = rolling_N[-1], n

    def __len__(self) -> int:
        return int(self._rows.length_R[self._row])

    @property
    def ids(self) -> IntArray:
        """Int64 [capacity], as all four; the first ``len(self)`` entries are valid. See HistoryRows."""
        return self._rows.ids_RN[self._row, : self.capacity]

    @property
    def repeats(self) -> IntArray:
        """See HistoryRows."""
        return self._rows.repeats_RN[self._row, : self.capacity]

    @property
    def turn_start(self) -> IntArray:
        """See HistoryRows."""
        return self._rows.turn_start_RN[self._row, : self.capacity]

    @property
    def prefix_hash(self) -> IntArray:
        """See HistoryRows."""
        return self._rows.prefix_hash_RN[self._row, : self.capacity]

    def move(self, rows: HistoryRows | None = None, row: int = 0) -> None:
        """Goes on in a row of ``rows``, or in one of its own."""
        rows = rows or HistoryRows(1, self.capacity)
        rows.take(row, self._rows, self._row)
        self._rows, self._row = rows, row

    def append(self, token_id: int) -> None:
        """Adds one token; raises ValueError when full or the id is negative."""
        if len(self) >= self.capacity:
            raise ValueError(f"the history is full: its capacity is {self.capacity}")
        if token_id < 0:
            raise ValueError(f"token ids must not be negative, got {token_id}")
        starts_turn = self._is_special_V is not None and bool(self._is_special_V[token_id])
        self._rows.append(np.array([self._row]), np.array([token_id]), np.array([starts_turn]))


def sequence_batch(
    token_ids: Sequence[int],
    *,
    prompt_len: int | None = None,
    row: int = 0,
    token_types: TokenTypeTable | None = None,
) -> TokenBatch:
    """One whole sequence as a CPU ``TokenBatch``: a prompt, then decode tokens.

    For what happens outside an engine's steps: calibration, label making, deciding a whole request.

    Args:
        token_ids: at least one.
        prompt_len: so many tokens are the prompt (prefill), the others decode; None: all of them.
        row: the request's row.
        token_types: of the vocabulary, for features that look at turns; None: turns are not known.
    """
    is_special_V = None if token_types is None else token_types.is_special_V.numpy()
    history = TokenHistory(token_ids, len(token_ids), is_special_V)
    n = len(history)
    prompt_len = n if prompt_len is None else prompt_len
    if not 1 <= prompt_len <= n:
        raise ValueError(f"prompt_len {prompt_len} is outside 1 to {n}")
    phase_T = torch.full((n,), int(Phase.PREFILL))
    phase_T[prompt_len:] = int(Phase.DECODE)
    return TokenBatch(
        ids_T=torch.from_numpy(history.ids),
        positions_T=torch.arange(n),
        row_T=torch.full((n,), row),
        phase_T=phase_T,
        prompt_len_T=torch.full((n,), prompt_len),
        repeats_T=torch.from_numpy(history.repeats),
        previous_T=torch.from_numpy(np.concatenate([[-1], history.ids[:-1]])),
        turn_start_T=torch.from_numpy(history.turn_start),
        prefix_hash_T=torch.from_numpy(history.prefix_hash),
    )


def _earlier_occurrences(ids_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each entry the number of equal entries before it."""
    order_N = np.argsort(ids_N, kind="stable")
    sorted_N = ids_N[order_N]
    index_N = np.arange(len(ids_N))
    is_first_N = np.r_[True, sorted_N[1:] != sorted_N[:-1]]
    group_start_N = np.maximum.accumulate(np.where(is_first_N, index_N, 0))
    result_N = np.empty_like(ids_N)
    result_N[order_N] = index_N - group_start_N
    return result_N


def _rolling_hash(ids_N: NDArray[np.int64]) -> NDArray[np.uint64]:
    """h_n = h_(n-1) * BASE + id_n + 1 modulo 2**64 from h_(-1) = START, without a loop.

    h_n / BASE**(n+1) is a running sum of (id_i + 1) / BASE**(i+1), and BASE has an inverse.
    """
    powers_N = np.cumprod(np.full(len(ids_N), _BASE, np.uint64), dtype=np.uint64)
    inverses_N = np.cumprod(np.full(len(ids_N), _BASE_INVERSE, np.uint64), dtype=np.uint64)
    terms_N = (ids_N.astype(np.uint64) + _ONE) * inverses_N
    return powers_N * (np.cumsum(terms_N, dtype=np.uint64) + np.uint64(_START))
