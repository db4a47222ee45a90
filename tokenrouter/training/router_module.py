"""The look-up tables of a router as a LightningModule: one network, or several whose scores are averaged.

B tokens of a batch, R rows of the table per token, K rows in all, S members, H hidden units of a member, P phases,
G groups of layers (1: one score for all), O = P * G scores, phase by phase; C = S * (H + O) columns: first all hidden
units, then what is added to the scores; V vocabulary, E hidden size, N pairs of a token and a layer.
"""

import math
from collections.abc import Sequence
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenrouter.routers.layer_groups import per_layer
from tokenrouter.routers.lookup import NUM_PHASES
from tokenrouter.training.losses import LOSSES, SHARES, LossName, rank_quality

MONITORED = "valid/gain_frac"
EMBEDDING_RATE, ENTROPY_RATE = 0.1, 0.3
"""Learning rates of maps from embeddings and from entropies, as multiples of the table's."""
Batch = Sequence[Tensor]


class RouterModule(lightning.LightningModule):
    """Learns a table and a head per phase, and what embeddings and entropies of ids add to the table's rows.

    Args:
        num_rows: K.
        first_id_row: from here on a row belongs to an id, the last one to all ids that have none.
        hidden: H; 0 for an additive score.
        members: S.
        embed_VE: float32, what is known of an id; None: nothing beside its row.
        loss: by name.
        cut_S: labels, as multiples of the mean, at which the top shares begin.
        learning_rate: of Adam.
        shrinkage: pulls rows to zero, in units of one token's loss.
        id_shrinkage: the same for rows of ids: the larger, the more an id seen seldom falls back to its type and
            frequency.
        embed_shrinkage: the same for maps from embeddings.
        seed: of the first weights.
        num_tokens: that are trained on.
        width_G: int64, layers of each group, by which it counts; ``[1]`` for one score.
    """

    table: Tensor
    head: Tensor
    penalty_K1: Tensor
    cut_S: Tensor
    embed_VE: Tensor
    width_G: Tensor

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
        width_G: Tensor,
        members: int = 1,
        embed_VE: Tensor | None = None,
        embed_shrinkage: float = 0.0,
    ) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.hidden, self.members = hidden, members
        num_scores = NUM_PHASES * len(width_G)
        units, columns = members * hidden, members * (hidden + num_scores)
        table_KC = torch.zeros(num_rows, columns)
        table_KC[:first_id_row, :units] = torch.randn(first_id_row, units, generator=draw) * 0.3
        self.table = torch.nn.Parameter(table_KC)
        scale = max(hidden, 1) ** -0.5
        self.head = torch.nn.Parameter(
            torch.randn(1, units, generator=draw).expand(num_scores, -1) * scale
        )
        self.register_buffer("embed_VE", embed_VE, persistent=False)
        if embed_VE is not None:
            size = embed_VE.shape[1]
            self.embed_map = torch.nn.Parameter(
                torch.randn(2, size, columns, generator=draw) * 0.05 * size**-0.5
            )
            self.entropy_map = torch.nn.Parameter(torch.randn(2, columns, generator=draw) * 0.1)
        penalty_K = torch.full((num_rows, 1), shrinkage)
        penalty_K[first_id_row:] = id_shrinkage
        self.register_buffer("penalty_K1", penalty_K / num_tokens, persistent=False)
        self.embed_penalty = embed_shrinkage / num_tokens
        self.register_buffer("cut_S", cut_S, persistent=False)
        self.register_buffer("width_G", width_G, persistent=False)
        self.loss_name: LossName = loss
        self.learning_rate = learning_rate
        self._scored: list[tuple[Tensor, Tensor]] = []

    def forward(
        self, rows_BR: Tensor, phase_B: Tensor, ids_B2: Tensor, entropy_B2: Tensor
    ) -> Tensor:
        """Scores of all members, float32 ``[B, S, G]``.

        Args:
            rows_BR: int64.
            phase_B: int64.
            ids_B2: int64, the id and the one before, -1 for none.
            entropy_B2: float32, of IdInputs.
        """
        sum_BC = F.embedding_bag(rows_BR, self.table, mode="sum")
        if self.embed_VE is not None:
            for index in (0, 1):
                has_id_B1 = (ids_B2[:, index, None] >= 0).float()
                embed_BE = self.embed_VE[ids_B2[:, index].clamp(min=0)] * has_id_B1
                sum_BC = sum_BC + embed_BE @ self.embed_map[index]
            sum_BC = sum_BC + entropy_B2 @ self.entropy_map
        units, num_groups = self.members * self.hidden, len(self.width_G)
        direct_BSPG: Tensor = sum_BC[:, units:].unflatten(1, (self.members, NUM_PHASES, num_groups))
        index_BS1G = phase_B[:, None, None, None].expand(-1, self.members, -1, num_groups)
        score_BSG = direct_BSPG.gather(2, index_BS1G).squeeze(2)
        if not units:
            return score_BSG
        head_BGU = self.head.unflatten(0, (NUM_PHASES, num_groups))[phase_B]
        added_BGU: Tensor = sum_BC[:, None, :units].relu() * head_BGU
        added_BGS: Tensor = added_BGU.unflatten(2, (self.members, -1)).sum(3)
        return score_BSG + added_BGS.transpose(1, 2)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch."""
        *inputs, label_BG = batch
        losses = [self._loss(score_BG, label_BG) for score_BG in self(*inputs).unbind(1)]
        loss = torch.stack(losses).sum() + (self.table.square() * self.penalty_K1).sum()
        if self.embed_VE is not None:
            loss = loss + self.embed_map.square().sum() * self.embed_penalty
        loss = loss / self.members
        self.log("train/loss", loss, on_step=False, on_epoch=True, batch_size=len(label_BG))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Keeps scores and labels until all are there."""
        *inputs, label_BG = batch
        score_BG = self(*inputs).mean(1)
        self.log("valid/loss", self._loss(score_BG, label_BG), batch_size=len(label_BG))
        self._scored.append((per_layer(score_BG, self.width_G), per_layer(label_BG, self.width_G)))

    def on_validation_epoch_end(self) -> None:
        """Quality over all validation tokens and their layers, per share and on average."""
        score_N, label_N = (torch.cat(part).flatten() for part in zip(*self._scored, strict=True))
        self._scored.clear()
        gains = []
        for share in SHARES:
            ranked = rank_quality(score_N, label_N, share)
            gains.append(ranked.gain_frac)
            for name, value in ranked._asdict().items():
                self.log(f"valid/{name}_at_{share:g}", value)
        self.log(MONITORED, sum(gains) / len(gains))

    def _loss(self, score_BG: Tensor, label_BG: Tensor) -> Tensor:
        weight_BG = (self.width_G / self.width_G.float().mean()).expand_as(score_BG)
        loss = LOSSES[self.loss_name]
        return loss(score_BG.flatten(), label_BG.flatten(), self.cut_S, weight_BG.flatten())

    def configure_optimizers(self) -> Any:
        """Adam with rates that fall to a tenth along a cosine."""
        groups: list[dict[str, Any]] = [{"params": [self.table, self.head]}]
        if self.embed_VE is not None:
            rates = (self.embed_map, EMBEDDING_RATE), (self.entropy_map, ENTROPY_RATE)
            groups += [{"params": [x], "lr": self.learning_rate * rate} for x, rate in rates]
        optimizer = torch.optim.Adam(groups, lr=self.learning_rate)
        epochs = max(self.trainer.max_epochs or 1, 1)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch: 0.55 + 0.45 * math.cos(math.pi * min(epoch / epochs, 1))
        )
        return {"optimizer": optimizer, "lr_scheduler": schedule}
