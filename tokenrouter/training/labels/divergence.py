"""KL and loss of rows behind the last layer, a few rows of logits at a time.

R rows, E hidden size, V vocabulary.
"""

import torch
from torch import Tensor

from tokenrouter.training.gradients import HEAD_ROWS, DifferentiableDecoder


def kl_nats(decoder: DifferentiableDecoder, high_RE: Tensor, low_RE: Tensor) -> Tensor:
    """KL(high || low) of the next token's distribution, float32 ``[R]``."""
    parts = []
    for a_RE, b_RE in zip(high_RE.split(HEAD_ROWS), low_RE.split(HEAD_ROWS), strict=True):
        logp_RV = decoder.logits(a_RE).log_softmax(-1)
        logq_RV = decoder.logits(b_RE).log_softmax(-1)
        parts.append(torch.linalg.vecdot(logp_RV.exp(), logp_RV - logq_RV))
    return torch.cat(parts).clamp_min_(0.0)


def loss_nats(decoder: DifferentiableDecoder, hidden_RE: Tensor, next_R: Tensor) -> Tensor:
    """Negative log-likelihood of the tokens that follow, float32 ``[R]``."""
    parts = [
        -decoder.logits(rows_RE).log_softmax(-1).gather(1, ids_R[:, None])[:, 0]
        for rows_RE, ids_R in zip(hidden_RE.split(HEAD_ROWS), next_R.split(HEAD_ROWS), strict=True)
    ]
    return torch.cat(parts)
