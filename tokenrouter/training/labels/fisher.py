"""The default label: the loss of rounding a token, to second order.

D draws, L layers, P linears of a layer, N tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tokenrouter.models.config import ModelConfig
from tokenrouter.training.gradients import DifferentiableDecoder
from tokenrouter.training.labels.base import Kind, LabelMaker, check_count, layer_columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Fisher(LabelMaker):
    """Half the Fisher information along what rounding changes: nats of KL in the rest of the window, per layer.

    Next tokens are drawn from the model and their log-probability is back-propagated; a token's label is half the sum,
    over a layer's linears, of the squared inner product of the gradient at the output with the low path's output minus
    the high one's, averaged over draws. Rounding errors of different linears count as independent.

    Attributes:
        draws: how many times next tokens are drawn: the more, the less noise.

    Raises:
        ValueError: ``draws`` is no integer above 0.
    """

    name: ClassVar[str] = "fisher"
    kind: ClassVar[Kind] = "precision"
    draws: int = 3

    def __post_init__(self) -> None:
        check_count(self.name, "draws", self.draws)

    def __call__(self, decoder: DifferentiableDecoder, ids_N: Tensor, seed: int) -> Tensor:
        """See LabelMaker."""
        trace = decoder.trace(ids_N)
        generator = torch.Generator().manual_seed(seed)
        gradients_DNE = decoder.drawn_gradients(trace, self.draws, generator)
        effects_DLPN = decoder.effects(trace, gradients_DNE)
        return effects_DLPN.square().sum(2).mean(0).t().contiguous() / 2

    def columns(self, config: ModelConfig) -> tuple[str, ...]:
        """See LabelMaker."""
        return layer_columns(config)
