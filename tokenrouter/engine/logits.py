"""What is done to logits before a token is drawn, and the log-probabilities that are reported.

P rows to process, R rows to rank, T tokens, V vocabulary, K leading candidates of a row, U updates of
single logits, B requests of a step.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenrouter.outputs import Logprob
from tokenrouter.sampling_params import SamplingParams

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]

FLOAT32_SAFE = 1e30
"""User factors are kept inside 1 / this .. this, so that float32 logits stay finite."""

_LOGPROB_ROWS = 64
"""Rows of [V] that ``top_logprobs`` works on at once; bounds its memory."""


class TokenCounts:
    """The distinct tokens of one sequence and how often each came in its output.

    Only these tokens can be penalised, so a step touches them instead of the whole vocabulary.

    Args:
        prompt_ids: tokens that count as seen, with 0 occurrences in the output.
    """

    def __init__(self, prompt_ids: Sequence[int] = ()) -> None:
        self._index = {token_id: i for i, token_id in enumerate(dict.fromkeys(prompt_ids))}
        self._ids: IntArray = np.fromiter(self._index, np.int64, len(self._index))
        self._counts: FloatArray = np.zeros(len(self._index), np.float32)

    def add(self, token_id: int) -> None:
        """One more occurrence in the output."""
        slot = self._index.setdefault(token_id, len(self._index))
        if slot >= len(self._ids):
            room = max(16, len(self._ids))
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        self._ids[slot] = token_id
        self._counts[slot] += 1

    @property
    def ids_U(self) -> IntArray:
        """Distinct ids, in the order of their first occurrence; a view."""
        return self._ids[: len(self._index)]

    @property
    def counts_U(self) -> FloatArray:
        """Occurrences in the output of each of ``ids_U``; a view."""
        return self._counts[: len(self._index)]


class _Updates(NamedTuple):
    """Single logits to change: ``logits[rows_U, ids_U]``, and the values that go with them."""

    rows_U: Tensor
    ids_U: Tensor
    values_U: Tensor

    @classmethod
    def build(
        cls, ids: Sequence[tuple[int, IntArray]], values: Sequence[FloatArray], device: torch.device
    ) -> "_Updates":
        """From (row, its ids) pairs and the values of each."""
        rows = np.repeat(
            np.array([row for row, _ in ids], np.int64), [len(row_ids) for _, row_ids in ids]
        )
        return cls(
            torch.from_numpy(rows).to(device),
            torch.from_numpy(np.concatenate([row_ids for _, row_ids in ids])).to(device),
            torch.from_numpy(np.concatenate(values)).to(device),
        )


def add_bias_(logits_PV: Tensor, bias: Sequence[tuple[int, IntArray, FloatArray]]) -> None:
    """Adds, in place, each (row, ids, values) to the logits."""
    if bias:
        ids = [(row, row_ids) for row, row_ids, _ in bias]
        updates = _Updates.build(ids, [values for _, _, values in bias], logits_PV.device)
        logits_PV[updates.rows_U, updates.ids_U] += updates.values_U


def mask_tokens_(logits_PV: Tensor, masked: Sequence[tuple[int, Iterable[int]]]) -> None:
    """Sets, in place, the ids of each (row, ids) to -inf; ids beyond V are skipped."""
    pairs = [(row, i) for row, ids in masked for i in ids if i < logits_PV.shape[1]]
    if pairs:
        rows_U, ids_U = torch.tensor(pairs, device=logits_PV.device).T
        logits_PV[rows_U, ids_U] = -math.inf


def penalise_(
    logits_PV: Tensor, sequences: Sequence[tuple[int, SamplingParams, TokenCounts]]
) -> None:
    """Applies, in place, the penalties of each (row, params, counts).

    Defined as in vLLM. Repetition (CTRL, arXiv:1909.05858) takes every token of ``counts``;
    frequency and presence take those with occurrences in the output.
    """
    if not sequences:
        return
    updates = _Updates.build(
        [(row, counts.ids_U) for row, _, counts in sequences],
        [counts.counts_U for _, _, counts in sequences],
        logits_PV.device,
    )
    rows_U, ids_U, counts_U = updates
    settings_P3 = torch.zeros(logits_PV.shape[0], 3)
    for row, params, _ in sequences:
        repetition = min(max(params.repetition_penalty, 1 / FLOAT32_SAFE), FLOAT32_SAFE)
        settings_P3[row] = torch.tensor(
            [repetition, params.frequency_penalty, params.presence_penalty]
        )
    repetition_U, frequency_U, presence_U = settings_P3.to(logits_PV.device)[rows_U].T
    values_U = logits_PV[rows_U, ids_U]
    values_U = torch.where(values_U > 0, values_U / repetition_U, values_U * repetition_U)
    values_U -= frequency_U * counts_U + presence_U * (counts_U > 0)
    logits_PV[rows_U, ids_U] = values_U


def leading(logits_RV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ``width`` largest logits of each row and their ids, largest first.

    Equal logits come in the order of their ids. Where they straddle the end, it is arbitrary which
    of them are taken, unless ``width`` is V.
    """
    values_RK, ids_RK = logits_RV.topk(min(width, logits_RV.shape[1]), dim=-1, sorted=False)
    # One int64 per candidate that orders by value, then by lower id; + 0.0 makes -0.0 equal to 0.0.
    bits_RK = (values_RK + 0.0).view(torch.int32)
    bits_RK = bits_RK ^ ((bits_RK >> 31) & 0x7FFFFFFF)
    order_RK = ((bits_RK.long() << 32) - ids_RK).argsort(dim=-1, descending=True)
    return values_RK.gather(1, order_RK), ids_RK.gather(1, order_RK)


def top_logprobs(logits_TV: Tensor, token_ids_T: Tensor, k: int) -> list[dict[int, Logprob]]:
    """Log-probabilities of the given tokens and of the ``k`` most likely ones.

    Candidates rank by log-probability, equal ones by lower id; ranks start at 1.

    Args:
        logits_TV: any float dtype; not modified.
        token_ids_T: int64, the token that was sampled, or that stands in the prompt.
        k: 0 gives the given tokens only.

    Returns:
        Per row up to ``k + 1`` entries: the given token first, then the most likely ones.

    Raises:
        RuntimeError: a row holds NaN, or -inf only.
    """
    result: list[dict[int, Logprob]] = []
    for start in range(0, logits_TV.shape[0], _LOGPROB_ROWS):
        rows = slice(start, start + _LOGPROB_ROWS)
        part_TV = logits_TV[rows].float()
        ids_T1 = token_ids_T[rows].to(logits_TV.device).unsqueeze(1)
        ids_TC = torch.cat([ids_T1, _most_likely(part_TV, min(k, logits_TV.shape[1]))], dim=1)
        values_TC = part_TV.gather(1, ids_TC) - part_TV.logsumexp(dim=-1, keepdim=True)
        broken_T = values_TC[:, 0].isnan()
        if bool(broken_T.any()):
            row = start + int(broken_T.nonzero()[0])
            raise RuntimeError(f"row {row}: no log-probabilities, the logits hold NaN or only -inf")
        ranks = _ranks(part_TV, ids_T1, ids_TC[:, 1:])
        for rank, ids, values in zip(ranks, ids_TC.tolist(), values_TC.tolist(), strict=True):
            entries = zip(ids, values, [rank, *range(1, len(ids))], strict=True)
            result.append({i: Logprob(logprob=v, rank=r) for i, v, r in entries})
    return result


def _most_likely(logits_TV: Tensor, k: int) -> Tensor:
    """Ids [T, k] of the largest logits in order, of equals the lower ids."""
    if k == 0:
        return torch.empty(logits_TV.shape[0], 0, dtype=torch.int64, device=logits_TV.device)
    values_TK, ids_TK = leading(logits_TV, k)
    tied_T = (logits_TV >= values_TK[:, -1:]).sum(dim=-1, dtype=torch.int32) > k
    for row in tied_T.nonzero().flatten().tolist():
        ids_U = (logits_TV[row] >= values_TK[row, -1]).nonzero().flatten()
        order_U = logits_TV[row, ids_U].argsort(descending=True, stable=True)
        ids_TK[row] = ids_U[order_U[:k]]
    return ids_TK


def _ranks(logits_TV: Tensor, ids_T1: Tensor, ids_TK: Tensor) -> list[int]:
    """Rank from 1 of one token per row in the order of ``_most_likely``, which gave ``ids_TK``."""
    found_TK = ids_TK == ids_T1
    rank_T = found_TK.long().cumsum(dim=-1).eq(0).sum(dim=-1) + 1
    if (rest := (~found_TK.any(dim=-1)).nonzero().flatten()).numel():
        rest_RV, ids_R1 = logits_TV[rest], ids_T1[rest]
        value_R1 = rest_RV.gather(1, ids_R1)
        ids_V = torch.arange(logits_TV.shape[1], device=logits_TV.device)
        before_RV = (rest_RV > value_R1) | ((rest_RV == value_R1) & (ids_V < ids_R1))
        rank_T[rest] = before_RV.sum(dim=-1) + 1
    return [int(rank) for rank in rank_T.tolist()]


def requested_logprobs(
    logits_BV: Tensor, ids_B: Tensor, wanted_B: IntArray
) -> list[dict[int, Logprob] | None]:
    """``top_logprobs`` of each row that wants some; None for the others, whose number is negative."""
    result: list[dict[int, Logprob] | None] = [None] * len(wanted_B)
    for k in np.unique(wanted_B[wanted_B >= 0]).tolist():
        rows = np.flatnonzero(wanted_B == k).tolist()
        found = top_logprobs(logits_BV[rows], ids_B[rows], k)
        for row, entry in zip(rows, found, strict=True):
            result[row] = entry
    return result
