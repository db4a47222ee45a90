"""A request's tokens so far, with the running values that features and hashed draws need.

Shape letters: N tokens of one request, T tokens of a batch, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tokenrouter.features.token_types import TokenTypeTable
from tokenrouter.types import Phase, TokenBatch

_MASK = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
_BASE_INVERSE = pow(_BASE, -1, 1 << 64)
_START = 0xD1B54A32D192ED03
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64, Steele et al. 2014


class TokenHistory:
    """Ids, repeats, turns and prefix hashes of one request; appending equals building from scratch.

    Args:
        prompt_ids: the tokens that it begins with, at least one.
        capacity: the most tokens that it will hold.
        is_special_V: bool, which ids begin a turn; None: not known, and no turns are.

    Attributes:
        ids: int64 [capacity]; the first ``len(self)`` entries are valid, in all four arrays.
        repeats: int64 [capacity], how often the same id came earlier.
        turn_start: int64 [capacity], position of the last special token up to and including this
            one, 0 where there is none; -1 where special tokens are not known.
        prefix_hash: int64 [capacity], hash of the ids up to and including this one: a polynomial
            rolling hash, then splitmix64's finaliser. Equal prefixes have equal hashes; a cache
            that relies on the converse must compare ids.

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
        self.ids = np.zeros(capacity, dtype=np.int64)
        self.repeats = np.zeros(capacity, dtype=np.int64)
        self.turn_start = np.full(capacity, -1)
        self.prefix_hash = np.zeros(capacity, dtype=np.int64)
        self._is_special_V = is_special_V
        rolling_N = _rolling_hash(prompt_N)
        self.ids[:n] = prompt_N
        self.repeats[:n] = _earlier_occurrences(prompt_N)
        if is_special_V is not None:
            starts_N = np.where(is_special_V[prompt_N], np.arange(n), 0)
            self.turn_start[:n] = np.maximum.accumulate(starts_N)
        self.prefix_hash[:n] = _finalise(rolling_N).view(np.int64)
        values, counts = np.unique(prompt_N, return_counts=True)
        self._counts: dict[int, int] = dict(zip(values.tolist(), counts.tolist(), strict=True))
        self._rolling = int(rolling_N[-1])
        self._length = n

    def __len__(self) -> int:
        return self._length

    def move(
        self,
        ids_N: NDArray[np.int64],
        repeats_N: NDArray[np.int64],
        turn_start_N: NDArray[np.int64],
        prefix_hash_N: NDArray[np.int64],
    ) -> None:
        """Goes on in other arrays; their length is the capacity, and must hold what is there."""
        n = self._length
        ids_N[:n] = self.ids[:n]
        repeats_N[:n] = self.repeats[:n]
        turn_start_N[:n] = self.turn_start[:n]
        prefix_hash_N[:n] = self.prefix_hash[:n]
        self.ids, self.repeats = ids_N, repeats_N
        self.turn_start, self.prefix_hash = turn_start_N, prefix_hash_N

    def append(self, token_id: int) -> None:
        """Adds one token in constant time; raises ValueError when full or the id is negative."""
        n = self._length
        if n >= len(self.ids):
            raise ValueError(f"the history is full: its capacity is {len(self.ids)}")
        if token_id < 0:
            raise ValueError(f"token ids must not be negative, got {token_id}")
        seen = self._counts.get(token_id, 0)
        self._counts[token_id] = seen + 1
        self._rolling = (self._rolling * _BASE + token_id + 1) & _MASK
        x = self._rolling
        x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
        x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
        x ^= x >> 31
        self.ids[n] = token_id
        self.repeats[n] = seen
        starts_turn = self._is_special_V is not None and self._is_special_V[token_id]
        self.turn_start[n] = n if starts_turn else self.turn_start[n - 1]
        self.prefix_hash[n] = x - (1 << 64) if x >> 63 else x
        self._length = n + 1


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
    terms_N = (ids_N.astype(np.uint64) + np.uint64(1)) * inverses_N
    return powers_N * (np.cumsum(terms_N, dtype=np.uint64) + np.uint64(_START))


def _finalise(x_N: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: every input bit reaches every output bit."""
    x_N = (x_N ^ (x_N >> np.uint64(30))) * np.uint64(_MIX_1)
    x_N = (x_N ^ (x_N >> np.uint64(27))) * np.uint64(_MIX_2)
    return x_N ^ (x_N >> np.uint64(31))
