"""How much the loss at a token moves when everything runs low. N tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tokenrouter.models.config import ModelConfig
from tokenrouter.training.gradients import DifferentiableDecoder
from tokenrouter.training.labels.base import Kind, LabelMaker
from tokenrouter.training.labels.divergence import loss_nats
from tokenrouter.training.labels.own_kl import ALL_LOW


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnLoss(LabelMaker):
    """By how many nats the loss of the text's next token changes, up or down; NaN at the window's last token."""

    name: ClassVar[str] = "own_loss"
    kind: ClassVar[Kind] = "precision"

    def __call__(self, decoder: DifferentiableDecoder, ids_N: Tensor, seed: int) -> Tensor:
        """See LabelMaker; nothing is drawn. A window of one token is refused."""
        if len(ids_N) < 2:
            raise ValueError(
                "labels=own_loss needs windows of at least 2 tokens: the last has no successor"
            )
        high_NE = decoder.trace(ids_N).inputs[-1]
        low_NE = decoder.routed(ids_N, ALL_LOW)[0]
        high_M, low_M = (loss_nats(decoder, x_NE[:-1], ids_N[1:]) for x_NE in (high_NE, low_NE))
        return torch.cat([(low_M - high_M).abs(), high_M.new_full((1,), torch.nan)])[:, None]

    def columns(self, config: ModelConfig) -> tuple[str, ...]:
        """See LabelMaker."""
        return ("all_layers",)
