"""Random tokens: inverse transform sampling (Devroye 1986, chapter III), one uniform number per row.

T rows, V vocabulary.
"""

import torch
from torch import Tensor

from tokenrouter.kernels.checks import check_rows


def draw(x_TV: Tensor, inverse_temperature_T: Tensor, uniform_T: Tensor) -> Tensor:
    """See KernelSet: the first index whose weights, with those before it, exceed ``uniform`` of the row's sum."""
    check_rows(x_TV)
    for name, given_T in (("inverse_temperature", inverse_temperature_T), ("uniform", uniform_T)):
        if given_T.shape != x_TV.shape[:1]:
            raise ValueError(
                f"{name} must have shape {list(x_TV.shape[:1])}, got {list(given_T.shape)}"
            )
    if not bool((inverse_temperature_T.isfinite() & (inverse_temperature_T > 0)).all()):
        raise ValueError("inverse_temperature must be finite and above 0 in every row")
    if not bool(((uniform_T >= 0) & (uniform_T < 1)).all()):
        raise ValueError("uniform must be in [0, 1) in every row")
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
