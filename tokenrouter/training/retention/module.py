"""One hidden layer over entry features as a LightningModule.

B rows of a batch, F features, P hidden units.
"""

from collections.abc import Sequence
from typing import Any

import lightning
import torch
from torch import Tensor

MONITORED = "valid/loss"
Batch = Sequence[Tensor]


class RetentionModule(lightning.LightningModule):
    """Learns the logarithm of the expected label, tempered, by Poisson deviance.

    Labels have long tails: single entries hold most of what a window loses. A power below 1 keeps them from being all
    that is learned, and does not change which of two certain entries is worth more.

    Args:
        values_RF: float32 features of the training rows: their means, spreads and ranges are part of the model.
        hidden: units.
        power: of the label.
        learning_rate: of Adam; falls along a cosine.
        seed: of the first weights.
    """

    center_F: Tensor
    scale_F: Tensor
    low_F: Tensor
    high_F: Tensor

    def __init__(
        self, values_RF: Tensor, *, hidden: int, power: float, learning_rate: float, seed: int
    ) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        num_features = values_RF.shape[1]
        self.register_buffer("center_F", values_RF.mean(0))
        self.register_buffer("scale_F", values_RF.std(0).clamp_min(1e-3))
        self.register_buffer("low_F", values_RF.amin(0))
        self.register_buffer("high_F", values_RF.amax(0))
        first_PF = torch.randn(hidden, num_features, generator=draw) * num_features**-0.5
        self.hidden_PF = torch.nn.Parameter(first_PF)
        self.hidden_bias_P = torch.nn.Parameter(torch.zeros(hidden))
        self.out_P = torch.nn.Parameter(torch.randn(hidden, generator=draw) * hidden**-0.5)
        self.bias = torch.nn.Parameter(torch.zeros(()))
        self.power, self.learning_rate = power, learning_rate

    def tensors(self) -> dict[str, Tensor]:
        """What a RetentionModel takes; the bias changes no order and is left out."""
        names = ("center_F", "scale_F", "low_F", "high_F", "hidden_PF", "hidden_bias_P", "out_P")
        return {name: getattr(self, name).detach().clone() for name in names}

    def forward(self, values_BF: Tensor) -> Tensor:
        """Scores, float32 ``[B]``."""
        bounded_BF = values_BF.clamp(self.low_F, self.high_F)
        standard_BF = (bounded_BF - self.center_F) / self.scale_F
        hidden_BP = torch.addmm(self.hidden_bias_P, standard_BF, self.hidden_PF.t()).relu()
        score_B: Tensor = hidden_BP @ self.out_P + self.bias
        return score_B

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch."""
        loss = self._loss(batch)
        self.log("train/loss", loss, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The same on other windows."""
        self.log(MONITORED, self._loss(batch), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        """Adam with a rate that falls to a tenth along a cosine."""
        optimizer = torch.optim.Adam(self.parameters(), lr=self.learning_rate)
        epochs = max(self.trainer.max_epochs or 1, 1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=epochs, eta_min=self.learning_rate / 10
        )
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def _loss(self, batch: Batch) -> Tensor:
        values_BF, label_B, weight_B = batch
        score_B = self(values_BF)
        deviance_B = score_B.exp() - label_B**self.power * score_B
        loss: Tensor = (deviance_B * weight_B).sum() / weight_B.sum()
        return loss
