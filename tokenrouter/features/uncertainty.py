"""How sure a model was of its next token: four numbers of each row of logits.

Shape letters: R rows, V vocabulary.
"""

from collections.abc import Collection

import torch
from torch import Tensor

_ROWS = 64
"""Rows of [V] held at once in float32; bounds the memory."""


def uncertainty(logits_RV: Tensor, ids_R: Tensor, wanted: Collection[str]) -> dict[str, Tensor]:
    """The wanted ones of ``entropy``, ``margin``, ``top1`` and ``surprise``, float32 [R] each.

    Of the model's own distribution: temperature 1, without penalties, bias and cuts. One
    log-softmax per row serves all four.

    Args:
        logits_RV: any float dtype; not modified.
        ids_R: int64, the token that was drawn from each row, or forced.
        wanted: names of those to compute.

    Returns:
        entropy: in nats, 0 to ln V. margin: probability of the likeliest token less that of the
        second. top1: probability of the likeliest. surprise: -log p of ``ids_R`` in nats. NaN where
        a row of logits holds NaN.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in wanted}
    for start in range(0, len(logits_RV), _ROWS):
        part = slice(start, start + _ROWS)
        logp_RV = logits_RV[part].log_softmax(dim=-1, dtype=torch.float32)
        if "margin" in found or "top1" in found:
            best_R2 = logp_RV.topk(2, dim=-1).values.exp_()
            if "margin" in found:
                found["margin"].append(best_R2[:, 0] - best_R2[:, 1])
            if "top1" in found:
                found["top1"].append(best_R2[:, 0])
        if "surprise" in found:
            surprise_R1 = logp_RV.gather(1, ids_R[part].unsqueeze(1)).neg_()
            found["surprise"].append(surprise_R1.squeeze(1))
        if "entropy" in found:
            found["entropy"].append(torch.special.entr(logp_RV.exp_()).sum(dim=-1))
    return {
        name: torch.cat(parts) if parts else logits_RV.new_empty(0, dtype=torch.float32)
        for name, parts in found.items()
    }
