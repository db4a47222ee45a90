"""Random tokens: inverse transform sampling (Devroye 1986, chapter III), one uniform number per row.

T rows, V vocabulary.
"""

import torch
from torch import Tensor


def draw(x_TV: Tensor, inverse_temperature_T: Tensor, uniform_T: Tensor) -> Tensor:
    """See KernelSet: the first index whose weights, with those before it, exceed ``uniform`` of the row's sum."""
    logits_TV = x_TV.float()
    scaled_TV = logits_TV - logits_TV.amax(dim=-1, keepdim=True)
    weights_TV = scaled_TV.mul_(inverse_temperature_T.unsqueeze(1)).exp_()
    sums_TV = weights_TV.cumsum(dim=-1, dtype=torch.float64)
    total_T1 = sums_TV[:, -1:]
    # Below the total, whatever the product rounds to: so there is one, and its own weight is not zero.
    target_T1 = (uniform_T.unsqueeze(1) * total_T1).minimum(
        total_T1.nextafter(torch.zeros_like(total_T1))
    )
    ids_T = torch.searchsorted(sums_TV, target_T1, right=True).squeeze(1)
    return ids_T.where(total_T1.squeeze(1).isfinite(), -1)
