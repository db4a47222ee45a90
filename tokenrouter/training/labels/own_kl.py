"""How far a token's own prediction moves when everything runs low. N tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tokenrouter.models.config import ModelConfig
from tokenrouter.training.gradients import DifferentiableDecoder
from tokenrouter.training.labels.base import Kind, LabelMaker
from tokenrouter.training.labels.divergence import kl_nats

ALL_LOW = torch.ones(1, 1, 1, dtype=torch.bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnKL(LabelMaker):
    """KL(high || all low) of the prediction at the token itself, in nats: an effect, wherever its cause lies."""

    name: ClassVar[str] = "own_kl"
    kind: ClassVar[Kind] = "precision"

    def __call__(self, decoder: DifferentiableDecoder, ids_N: Tensor, seed: int) -> Tensor:
        """See LabelMaker; nothing is drawn."""
        low_NE = decoder.routed(ids_N, ALL_LOW)[0]
        return kl_nats(decoder, decoder.trace(ids_N).inputs[-1], low_NE)[:, None]

    def columns(self, config: ModelConfig) -> tuple[str, ...]:
        """See LabelMaker."""
        return ("all_layers",)
