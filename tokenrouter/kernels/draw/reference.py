"""Random tokens: inverse transform sampling (Devroye 1986, chapter III), one uniform number per row.

T rows, V vocabulary.
"""

import torch
from torch import Tensor

from tokenrouter.kernels.checks import check_rows


def draw(x_TV: Tensor, inverse_temperature_T: Tensor, uniform_T: Tensor) -> Tensor:
    """See KernelSet: the first index whose weights, with those before it, exceed ``uniform`` of the row's sum."""
    check_draw(x_TV, inverse_temperature_T, uniform_T)
    logits_TV = x_TV.float()
    scaled_TV = logits_TV - logits_TV.amax(dim=-1, keepdim=True)
    weights_TV = scaled_TV.mul_(inverse_temperature_T.unsqueeze(1)).exp_()
    sums_TV = weights_TV.cumsum(dim=-1, dtype=torch.float64)
    return first_beyond(sums_TV, sums_TV[:, -1:], uniform_T)


def first_beyond(sums_TV: Tensor, total_T1: Tensor, uniform_T: Tensor) -> Tensor:
    """The first index of each row of cumulative weights that exceeds ``uniform`` of the total, -1 where that is NaN."""
    # Below the total, whatever the product rounds to: so there is one, and its own weight is not zero.
    target_T1 = (uniform_T.unsqueeze(1) * total_T1).minimum(
        total_T1.nextafter(torch.zeros_like(total_T1))
    )
    ids_T = torch.searchsorted(sums_TV, target_T1, right=True).squeeze(1)
    return ids_T.where(total_T1.squeeze(1).isfinite(), -1)


def check_draw(x_TV: Tensor, inverse_temperature_T: Tensor, uniform_T: Tensor) -> None:
    """Raises ValueError for what no row can be drawn by, and for another number of rows."""
    check_rows(x_TV)
    check_per_row(x_TV, inverse_temperature=inverse_temperature_T, uniform=uniform_T)
    if not bool((inverse_temperature_T.isfinite() & (inverse_temperature_T > 0)).all()):
        raise ValueError("inverse_temperature must be finite and above 0 in every row")
    if not bool(((uniform_T >= 0) & (uniform_T < 1)).all()):
        raise ValueError("uniform must be in [0, 1) in every row")


def check_per_row(x_TV: Tensor, **given_T: Tensor) -> None:
    """Raises ValueError when one of the tensors is not one number per row of ``x_TV``."""
    for name, each_T in given_T.items():
        if each_T.shape != x_TV.shape[:1]:
            raise ValueError(
                f"{name} must have shape {list(x_TV.shape[:1])}, got {list(each_T.shape)}"
            )
