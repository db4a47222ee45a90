"""The look-up tables of a router as a LightningModule.

B tokens of a batch, R rows of the table per token, K rows in all, C columns, P phases, H hidden units, S shares.
"""

from collections.abc import Sequence
from typing import Any

import lightning
import torch
from torch import Tensor

from tokenrouter.routers.lookup import NUM_PHASES, score_rows
from tokenrouter.training.losses import LOSSES, SHARES, LossName, rank_quality

MONITORED = "valid/gain_frac"
Batch = Sequence[Tensor]


class RouterModule(lightning.LightningModule):
    """Learns a table and a head per phase.

    Args:
        num_rows: K.
        first_id_row: from here on a row belongs to an id, the last one to all ids that have none.
        hidden: H; 0 for an additive score.
        loss: by name.
        cut_S: labels, as multiples of the mean, at which the top shares begin.
        learning_rate: of Adam.
        shrinkage: pulls rows to zero, in units of one token's loss.
        id_shrinkage: the same for rows of ids: the larger, the more an id seen seldom falls back to its type and
            frequency.
        seed: of the first weights.
        num_tokens: that are trained on.
    """

    table: Tensor
    head: Tensor
    penalty_K1: Tensor
    cut_S: Tensor

    def __init__(
        self,
        *,
        num_rows: int,
        first_id_row: int,
        hidden: int,
        loss: LossName,
        cut_S: Tensor,
        learning_rate: float,
        shrinkage: float,
        id_shrinkage: float,
        seed: int,
        num_tokens: int,
    ) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        table_KC = torch.zeros(num_rows, hidden + NUM_PHASES)
        table_KC[:first_id_row, :hidden] = torch.randn(first_id_row, hidden, generator=draw) * 0.3
        self.table = torch.nn.Parameter(table_KC)
        scale = max(hidden, 1) ** -0.5
        self.head = torch.nn.Parameter(
            torch.randn(1, hidden, generator=draw).expand(NUM_PHASES, -1) * scale
        )
        penalty_K = torch.full((num_rows, 1), shrinkage)
        penalty_K[first_id_row:] = id_shrinkage
        self.register_buffer("penalty_K1", penalty_K / num_tokens, persistent=False)
        self.register_buffer("cut_S", cut_S, persistent=False)
        self.loss_name: LossName = loss
        self.learning_rate = learning_rate
        self._scored: list[tuple[Tensor, Tensor]] = []

    def forward(self, rows_BR: Tensor, phase_B: Tensor) -> Tensor:
        """Scores, float32 ``[B]``."""
        return score_rows(self.table, self.head, rows_BR, phase_B)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch."""
        rows_BR, phase_B, label_B = batch
        loss = LOSSES[self.loss_name](self(rows_BR, phase_B), label_B, self.cut_S)
        loss = loss + (self.table.square() * self.penalty_K1).sum()
        self.log("train/loss", loss, on_step=False, on_epoch=True, batch_size=len(label_B))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Keeps scores and labels until all are there."""
        rows_BR, phase_B, label_B = batch
        score_B = self(rows_BR, phase_B)
        loss = LOSSES[self.loss_name](score_B, label_B, self.cut_S)
        self.log("valid/loss", loss, batch_size=len(label_B))
        self._scored.append((score_B, label_B))

    def on_validation_epoch_end(self) -> None:
        """Quality over all validation tokens, per share and on average."""
        score_N, label_N = (torch.cat(part) for part in zip(*self._scored, strict=True))
        self._scored.clear()
        gains = []
        for share in SHARES:
            ranked = rank_quality(score_N, label_N, share)
            gains.append(ranked.gain_frac)
            for name, value in ranked._asdict().items():
                self.log(f"valid/{name}_at_{share:g}", value)
        self.log(MONITORED, sum(gains) / len(gains))

    def configure_optimizers(self) -> Any:
        """Adam with a rate that falls to a tenth along a cosine."""
        optimizer = torch.optim.Adam(self.parameters(), lr=self.learning_rate)
        epochs = self.trainer.max_epochs or 1
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=max(epochs, 1), eta_min=self.learning_rate / 10
        )
        return {"optimizer": optimizer, "lr_scheduler": schedule}
