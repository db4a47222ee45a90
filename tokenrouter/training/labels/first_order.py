"""The effect of rounding on the text's own loss, to first order.

L layers, P linears of a layer, N tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tokenrouter.models.config import ModelConfig
from tokenrouter.training.gradients import DifferentiableDecoder
from tokenrouter.training.labels.base import Kind, LabelMaker, layer_columns


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstOrder(LabelMaker):
    """By how many nats rounding a token changes the loss of the rest of the window, up or down, per layer.

    The sign is dropped: a token whose error happens to lower the loss of this text is as sensitive as one whose error
    raises it.
    """

    name: ClassVar[str] = "first_order"
    kind: ClassVar[Kind] = "precision"

    def __call__(self, decoder: DifferentiableDecoder, ids_N: Tensor, seed: int) -> Tensor:
        """See LabelMaker; nothing is drawn."""
        trace = decoder.trace(ids_N)
        effects_DLPN = decoder.effects(trace, decoder.text_gradients(trace))
        return effects_DLPN[0].sum(1).abs().t().contiguous()

    def columns(self, config: ModelConfig) -> tuple[str, ...]:
        """See LabelMaker."""
        return layer_columns(config)
