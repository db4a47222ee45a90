"""The yardstick: what really happens when one token runs low.

B routings at a time, L layers, N tokens, E hidden size.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tokenrouter.models.config import ModelConfig
from tokenrouter.training.gradients import DifferentiableDecoder
from tokenrouter.training.labels.base import Kind, LabelMaker, check_count, layer_columns
from tokenrouter.training.labels.divergence import kl_nats


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveOneOut(LabelMaker):
    """Exact KL(all high || this token low) summed over the token and the rest of the window, in nats.

    It takes a forward per token (and layer): for small windows, to correlate other labels against.

    Attributes:
        per_layer: a label per layer, the token low in that layer alone; else one, the token low in all layers.
        batch: forwards at a time.
        max_tokens: longer windows are refused.

    Raises:
        ValueError: ``batch`` or ``max_tokens`` is no integer above 0, or ``per_layer`` no bool.
    """

    name: ClassVar[str] = "leave_one_out"
    kind: ClassVar[Kind] = "precision"
    per_layer: bool = False
    batch: int = 8
    max_tokens: int = 256

    def __post_init__(self) -> None:
        check_count(self.name, "batch", self.batch)
        check_count(self.name, "max_tokens", self.max_tokens)
        if type(self.per_layer) is not bool:
            raise ValueError(
                f"labels={self.name}: per_layer={self.per_layer!r} must be true or false"
            )

    def __call__(self, decoder: DifferentiableDecoder, ids_N: Tensor, seed: int) -> Tensor:
        """See LabelMaker; nothing is drawn."""
        num_tokens = len(ids_N)
        if num_tokens > self.max_tokens:
            raise ValueError(
                f"labels={self.name} runs every token of a window by itself, and {num_tokens} tokens are more than "
                f"labels.max_tokens={self.max_tokens}: set collect.window_tokens to at most that, or raise it"
            )
        high_NE = decoder.trace(ids_N).inputs[-1]
        num_layers = decoder.config.num_layers if self.per_layer else 1
        cases_C2 = torch.cartesian_prod(torch.arange(num_tokens), torch.arange(num_layers))
        parts = []
        for cases_B2 in cases_C2.split(self.batch):
            rows_B, (token_B, layer_B) = torch.arange(len(cases_B2)), cases_B2.t()
            is_low_BLN = torch.zeros(len(rows_B), num_layers, num_tokens, dtype=torch.bool)
            is_low_BLN[rows_B, layer_B, token_B] = True
            low_BNE = decoder.routed(ids_N, is_low_BLN)
            # Tokens before the one that runs low do not see it; what they differ by is the batch's rounding.
            for low_NE, token in zip(low_BNE, token_B.tolist(), strict=True):
                parts.append(kl_nats(decoder, high_NE[token:], low_NE[token:]).sum())
        return torch.stack(parts).view(num_tokens, num_layers)

    def columns(self, config: ModelConfig) -> tuple[str, ...]:
        """See LabelMaker."""
        return layer_columns(config) if self.per_layer else ("all_layers",)
