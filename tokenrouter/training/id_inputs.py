"""What is known of ids before any label: their embeddings, and the entropy to expect behind them.

N tokens, V vocabulary, E hidden size, D = 2 * E.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenrouter.training.entropies import Entropies

RIDGE = 5000.0
"""Pulls the linear map from embeddings to entropies to zero, in units of one token's squared embedding element."""
FEW, FEW_PREVIOUS = 3.0, 9.0
"""So many tokens of an id, of a previous id weigh as much as what is expected without having seen them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IdInputs:
    """Inputs by id.

    Attributes:
        embed_VE: float32, each row with a mean square of 1.
        entropy_V: float32, nats: the entropy to expect behind an id, less the mean.
        previous_entropy_V: float32, nats: what the id before adds to it.
        count_V: float32, how often an id occurs in the statistics.
    """

    embed_VE: Tensor
    entropy_V: Tensor
    previous_entropy_V: Tensor
    count_V: Tensor

    def entropies(self, ids_N: Tensor, previous_N: Tensor) -> Tensor:
        """Float32 ``[N, 2]``, nats: of the id and of the id before, 0 where there is none.

        Args:
            ids_N: int64.
            previous_N: int64, -1 for none.
        """
        before_N = self.previous_entropy_V[previous_N.clamp(min=0)]
        return torch.stack([self.entropy_V[ids_N], before_N.masked_fill(previous_N < 0, 0)], 1)


def make_id_inputs(embed_VE: Tensor, found: Entropies) -> IdInputs:
    """Entropies by id: what a linear map of embeddings expects, corrected where ids were seen.

    Args:
        embed_VE: float32, the model's input embedding.
        found: of text that is not among the tokens to learn from.
    """
    num_ids = len(embed_VE)
    embed_VE = embed_VE / embed_VE.square().mean(1, keepdim=True).sqrt().clamp_min(1e-12)
    has_previous_N = found.previous_N >= 0
    ids_N, previous_N = found.ids_N[has_previous_N], found.previous_N[has_previous_N]
    rest_N = found.entropy_N[has_previous_N]
    rest_N = rest_N - rest_N.mean()
    entropy_V, previous_entropy_V = _linear(embed_VE, ids_N, previous_N, rest_N)
    rest_N = rest_N - entropy_V[ids_N] - previous_entropy_V[previous_N]
    own_V = _shrunk_mean(ids_N, rest_N, num_ids, FEW)
    rest_N = rest_N - own_V[ids_N]
    own_previous_V = _shrunk_mean(previous_N, rest_N, num_ids, FEW_PREVIOUS)
    return IdInputs(
        embed_VE=embed_VE,
        entropy_V=entropy_V + own_V,
        previous_entropy_V=previous_entropy_V + own_previous_V,
        count_V=torch.bincount(ids_N, minlength=num_ids).float(),
    )


def _linear(
    embed_VE: Tensor, ids_N: Tensor, previous_N: Tensor, value_N: Tensor
) -> tuple[Tensor, Tensor]:
    """By ridge regression, what an id and the id before each add to ``value_N``."""
    size = embed_VE.shape[1]
    gram_DD = torch.zeros(2 * size, 2 * size, dtype=torch.float64)
    moment_D = torch.zeros(2 * size, dtype=torch.float64)
    mean_D = torch.cat([embed_VE[ids_N].mean(0), embed_VE[previous_N].mean(0)])
    for ids_B, previous_B, value_B in zip(
        ids_N.split(8192), previous_N.split(8192), value_N.split(8192), strict=True
    ):
        x_BD = torch.cat([embed_VE[ids_B], embed_VE[previous_B]], 1) - mean_D
        gram_DD += (x_BD.t() @ x_BD).double()
        moment_D += (x_BD.t() @ value_B).double()
    weight_D = torch.linalg.solve(gram_DD + RIDGE * torch.eye(2 * size), moment_D).float()
    offset_D = mean_D * weight_D
    return (
        embed_VE @ weight_D[:size] - offset_D[:size].sum(),
        embed_VE @ weight_D[size:] - offset_D[size:].sum(),
    )


def _shrunk_mean(key_N: Tensor, value_N: Tensor, num_keys: int, few: float) -> Tensor:
    """Per key the mean of its values, as if ``few`` zeros were among them."""
    total = torch.zeros(num_keys).index_add_(0, key_N, value_N)
    return total / (torch.bincount(key_N, minlength=num_keys) + few)
