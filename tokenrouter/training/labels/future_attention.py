"""Retention: how much later tokens look at an entry, by how much later they come.

N tokens, H horizons, Q queries at a time, A attention heads, G key heads, K head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tokenrouter.models.config import ModelConfig
from tokenrouter.training.gradients import DifferentiableDecoder
from tokenrouter.training.labels.base import Kind, LabelMaker, check_count

QUERIES = 128  # at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class FutureAttention(LabelMaker):
    """``log1p`` of the relative attention that queries at a distance of at least each horizon put on a token.

    A weight is relative to uniform attention: times the number of entries that the query sees, so that 1 is uniform. It
    is averaged over layers, heads and the window's queries from ``position + horizon`` on; NaN where there are none.

    Attributes:
        horizons: distances in tokens, ascending.

    Raises:
        ValueError: no horizons, or one that is no integer above 0 or not above the one before it.
    """

    name: ClassVar[str] = "future_attention"
    kind: ClassVar[Kind] = "retention"
    horizons: Sequence[int] = (32, 256, 1024)

    def __post_init__(self) -> None:
        for horizon in self.horizons:
            check_count(self.name, "horizons", horizon)
        if not self.horizons or list(self.horizons) != sorted(set(self.horizons)):
            raise ValueError(
                f"labels={self.name}: horizons={list(self.horizons)} must be ascending distances, such as [32, 256]"
            )

    def __call__(self, decoder: DifferentiableDecoder, ids_N: Tensor, seed: int) -> Tensor:
        """See LabelMaker; nothing is drawn. A window in which no horizon fits is refused."""
        num_tokens = len(ids_N)
        if num_tokens <= self.horizons[0]:
            raise ValueError(
                f"labels={self.name}: a window of {num_tokens} tokens holds no query {self.horizons[0]} tokens after "
                "another: raise collect.window_tokens or lower labels.horizons"
            )
        trace = decoder.trace(ids_N)
        sum_NH = torch.zeros(num_tokens, len(self.horizons))
        windows = decoder.config.windows
        for window, (q_ANK, k_GNK) in zip(windows, decoder.queries_keys(trace), strict=True):
            self._add_layer(sum_NH, q_ANK, k_GNK, window)
        horizon_H = torch.tensor(self.horizons)
        num_queries_NH = (num_tokens - torch.arange(num_tokens)[:, None] - horizon_H).clamp_min(0)
        return (sum_NH / (num_queries_NH * len(windows))).log1p()

    def columns(self, config: ModelConfig) -> tuple[str, ...]:
        """See LabelMaker."""
        return tuple(f"after_{horizon}" for horizon in self.horizons)

    def _add_layer(self, sum_NH: Tensor, q_ANK: Tensor, k_GNK: Tensor, window: int | None) -> None:
        """Adds a layer's relative weights, mean over heads, summed over the queries beyond each horizon."""
        num_heads, num_tokens, head_dim = q_ANK.shape
        k_AKN = k_GNK.repeat_interleave(num_heads // len(k_GNK), 0).transpose(1, 2)
        key_N = torch.arange(num_tokens)
        for query_Q in key_N.split(QUERIES):
            age_QN = query_Q[:, None] - key_N
            is_seen_QN = (age_QN >= 0) & (age_QN < (window or num_tokens))
            scores_AQN = q_ANK[:, query_Q] @ k_AKN * head_dim**-0.5
            weight_QN = scores_AQN.masked_fill_(~is_seen_QN, -torch.inf).softmax(-1).mean(0)
            relative_QN = weight_QN * is_seen_QN.sum(1, keepdim=True)
            for column, horizon in enumerate(self.horizons):
                sum_NH[:, column] += (relative_QN * (age_QN >= horizon)).sum(0)
