"""Token by token: how far a run's distribution is from the reference's.

Shape letters: T rows given at once, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MAX_ROWS = 32  # few enough for the cache: three times as fast as 256 rows of 49,152 entries
BUCKET_EDGES = (0, 1, 16, 256, 1024, 2048)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class RowMetrics(NamedTuple):
    """Per row: KL in nats, the next token's NLL (NaN without one), whether top-1 agrees."""

    kl_T: Tensor
    nll_T: Tensor
    agree_T: Tensor


def compare_rows(reference_logp_TV: Tensor, logits_TV: Tensor, next_ids_T: Tensor) -> RowMetrics:
    """Compare a run with the reference, at most ``MAX_ROWS`` rows at a time.

    Args:
        reference_logp_TV: float32 log-probabilities of the reference.
        logits_TV: float32 logits of the run.
        next_ids_T: int64 the token that follows, -1 where there is none.
    """
    parts = []
    for start in range(0, logits_TV.shape[0], MAX_ROWS):
        rows = slice(start, start + MAX_ROWS)
        logp_TV, logq_TV = reference_logp_TV[rows], torch.log_softmax(logits_TV[rows], dim=-1)
        kl_T = torch.linalg.vecdot(logp_TV.exp(), logp_TV - logq_TV)
        agree_T = logp_TV.argmax(dim=-1) == logq_TV.argmax(dim=-1)
        nll_T = -logq_TV.gather(1, next_ids_T[rows, None].clamp(min=0))[:, 0]
        parts.append(
            RowMetrics(kl_T, nll_T.masked_fill(next_ids_T[rows] < 0, float("nan")), agree_T)
        )
    return RowMetrics(*(torch.cat(column) for column in zip(*parts, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """One entry per compared token.

    Attributes:
        window: index of its window.
        position: position in that window.
        kl_nats: KL(reference || run) of the distribution over the token after it.
        nll_nats: the run's negative log-likelihood of the token that follows; NaN at a window's
            end.
        agrees: the run's most likely token is the reference's.
        weight: how much the token counts in every mean (1, unless systems are mixed, see ``mix``).
    """

    window: Ints
    position: Ints
    kl_nats: Floats
    nll_nats: Floats
    agrees: Bools
    weight: Floats

    @classmethod
    def of(cls, window: int, position: int, rows: RowMetrics) -> "TokenScores":
        """Consecutive rows of one window that start at ``position``."""
        count = rows.kl_T.shape[0]
        return cls(
            window=np.full(count, window, dtype=np.int64),
            position=np.arange(position, position + count, dtype=np.int64),
            kl_nats=rows.kl_T.double().numpy(),
            nll_nats=rows.nll_T.double().numpy(),
            agrees=rows.agree_T.numpy(),
            weight=np.ones(count),
        )

    @classmethod
    def concatenate(cls, parts: Sequence["TokenScores"]) -> "TokenScores":
        """All parts after each other."""
        if not parts:
            raise ValueError("no token was compared")
        return cls(
            **{
                name: np.concatenate([getattr(part, name) for part in parts])
                for name in cls.__slots__
            }
        )

    def __len__(self) -> int:
        return int(self.position.shape[0])

    @property
    def kl_mean_nats(self) -> float:
        """Mean KL over tokens."""
        return float(np.average(self.kl_nats, weights=self.weight))

    @property
    def ppl(self) -> float:
        """Perplexity: exp of the mean negative log-likelihood over tokens that have a successor."""
        known = ~np.isnan(self.nll_nats)
        return float(np.exp(np.average(self.nll_nats[known], weights=self.weight[known])))

    @property
    def top1_agreement_frac(self) -> float:
        """Share of tokens where the most likely next token is the reference's."""
        return float(np.average(self.agrees, weights=self.weight))

    @property
    def num_windows(self) -> int:
        """That the tokens are of."""
        return len(np.unique(self.window))

    @property
    def kl_stderr_nats(self) -> float | None:
        """Standard error of the mean KL over windows; None with one window."""
        means = [self._mean_kl(self.window == index) for index in np.unique(self.window)]
        return float(np.std(means, ddof=1) / np.sqrt(len(means))) if len(means) > 1 else None

    def kl_by_position(self) -> dict[str, float]:
        """Mean KL per position bucket that holds a token."""
        return {name: self._mean_kl(mask) for name, mask in position_buckets(self.position)}

    def _mean_kl(self, mask: Bools) -> float:
        return float(np.average(self.kl_nats[mask], weights=self.weight[mask]))


def mix(high: TokenScores, low: TokenScores, high_frac_by_window: Sequence[float]) -> TokenScores:
    """Scores of a system that runs whole windows high or low, from those of all high and all low.

    Args:
        high: scores of some tokens, all high.
        low: scores of the same tokens, all low.
        high_frac_by_window: probability that a window runs high: 1, 0, or between at the one window
            on the threshold.
    """
    share = np.asarray(high_frac_by_window, dtype=np.float64)
    high_weight, low_weight = (
        high.weight * share[high.window],
        low.weight * (1.0 - share[low.window]),
    )
    return TokenScores.concatenate(
        [replace(high, weight=high_weight), replace(low, weight=low_weight)]
    )


def position_buckets(positions: Ints) -> Iterator[tuple[str, Bools]]:
    """Name and mask of each position bucket that holds a token; ``16_256`` is [16, 256)."""
    for start, stop in zip(BUCKET_EDGES, (*BUCKET_EDGES[1:], None), strict=True):
        mask = positions >= start
        if stop is not None:
            mask &= positions < stop
        if mask.any():
            yield f"{start}_{stop if stop is not None else 'up'}", mask
