"""What running completions ask for, by the row of their request: how to draw their tokens, and when to look at one.

R rows, V vocabulary, C chunks of a step whose next token is due.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tokenrouter.engine.row_owners import RowOwners
from tokenrouter.engine.sampler import SampledTokens
from tokenrouter.engine.sampling_rows import SETTINGS, SamplerState
from tokenrouter.engine.step import IntArray, PackedStep
from tokenrouter.sampling_params import SamplingParams
from tokenrouter.scheduler import Request, TokenRows

NO_ID = -1
StateOf = Callable[[Request], SamplerState]


class CompletionRows:
    """Written when a request comes into its row, read by every step.

    Args:
        eos_token_ids: of the model.
        vocab_size: of the model.

    Attributes:
        settings_R: SETTINGS, for the sampler.
    """

    def __init__(self, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        self._owners = RowOwners()
        self._eos_ids = [i for i in eos_token_ids if i < vocab_size]
        self._vocab_size = vocab_size
        self._resize(0)

    def meet(
        self, step: PackedStep, state_of: StateOf, is_watched: Callable[[Request], bool]
    ) -> None:
        """Writes down what the requests ask for that are new in their rows.

        Args:
            step: about to be sampled.
            state_of: what the sampler keeps for a request.
            is_watched: whether someone looks at each of its tokens.
        """
        if len(self.settings_R) != len(step.tokens.state_R):
            self._resize(len(step.tokens.state_R))
        for c in self._owners.newcomers(step).tolist():
            row, request = step.row_C[c], step.requests[c]
            params = request.params
            self.settings_R[row] = state_of(request).settings
            self._is_watched_R[row] = is_watched(request)
            self._limit_R[row] = _limit(request, params)
            self._write_last_ids(int(row), params)

    def to_visit(self, tokens: TokenRows, row_C: IntArray, ids_C: IntArray) -> IntArray:
        """The numbers c of those that someone looks at, or that may end, now that ``ids_C`` are their last tokens."""
        length_C = tokens.history.length_R[row_C]
        num_output_C = length_C - tokens.state_R["prompt_len"][row_C]
        is_stop_C = self._is_last_RV[row_C, ids_C]
        is_stop_C &= num_output_C >= self.settings_R["min_tokens"][row_C]
        is_seen_C = self._is_watched_R[row_C] | is_stop_C | (length_C >= self._limit_R[row_C])
        found_C: IntArray = np.flatnonzero(is_seen_C)
        return found_C

    def _write_last_ids(self, row: int, params: SamplingParams) -> None:
        """The ids that may end a completion, in place of those of the row's former owner."""
        self._is_last_RV[row, self._last_ids[row]] = False
        self._last_ids[row] = [*params.stop_ids, *([] if params.ignore_eos else self._eos_ids)]
        self._is_last_RV[row, self._last_ids[row]] = True

    def _resize(self, num_rows: int) -> None:
        self.settings_R: NDArray[np.void] = np.zeros(num_rows, SETTINGS)
        self._is_watched_R = np.zeros(num_rows, np.bool_)
        self._limit_R = np.zeros(num_rows, np.int64)
        self._last_ids: list[list[int]] = [[] for _ in range(num_rows)]
        self._is_last_RV = np.zeros((num_rows, self._vocab_size), np.bool_)


def _limit(request: Request, params: SamplingParams) -> int:
    """Tokens with which the request ends at the latest."""
    if params.max_tokens is None:
        return request.max_total
    return min(request.max_total, request.prompt_len + params.max_tokens)


def next_tokens(sampled: SampledTokens | None, requests: Sequence[Request]) -> IntArray:
    """The next token of each: the next given one of a forced request, NO_ID where none is left; else that drawn."""
    drawn = iter([] if sampled is None else sampled.ids_B.tolist())
    ids = []
    for request in requests:
        if request.forced_ids is None:
            ids.append(next(drawn))
        else:
            fed = request.num_tokens - request.prompt_len
            ids.append(request.forced_ids[fed] if fed < len(request.forced_ids) else NO_ID)
    return np.array(ids, np.int64)
