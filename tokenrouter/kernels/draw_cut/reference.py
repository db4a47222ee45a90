"""Random tokens of the likeliest: top_k, top_p (nucleus sampling, arXiv:1904.09751) and min_p (arXiv:2407.01082).

T rows, V vocabulary.
"""

import torch
from torch import Tensor

from tokenrouter.kernels.draw.reference import check_draw, check_per_row, first_beyond
from tokenrouter.kernels.values import Cut


def draw_cut(x_TV: Tensor, inverse_temperature_T: Tensor, uniform_T: Tensor, cut: Cut) -> Tensor:
    """See KernelSet: rows are sorted, cut after a rank, and drawn from as by ``draw``."""
    check_draw(x_TV, inverse_temperature_T, uniform_T)
    _check_cut(x_TV, cut)
    logits_TV, order_TV = x_TV.float().sort(dim=-1, descending=True, stable=True)
    scaled_TV = (logits_TV - logits_TV[:, :1]) * inverse_temperature_T.unsqueeze(1)
    left_out_TV = scaled_TV < cut.min_p_T.log().float().unsqueeze(1)
    rank_V = torch.arange(x_TV.shape[1], device=x_TV.device)
    left_out_TV |= (rank_V >= cut.top_k_T.unsqueeze(1)) & (cut.top_k_T > 0).unsqueeze(1)
    weights_TV = scaled_TV.exp_().masked_fill_(left_out_TV, 0)
    sums_TV = weights_TV.cumsum(dim=-1, dtype=torch.float64)
    wanted_T1 = cut.top_p_T.unsqueeze(1) * sums_TV[:, -1:]
    last_T1 = torch.searchsorted(sums_TV, wanted_T1).clamp(max=x_TV.shape[1] - 1)  # NaN: behind all
    rank_T = first_beyond(sums_TV, sums_TV.gather(1, last_T1), uniform_T)
    ids_T = order_TV.gather(1, rank_T.clamp(min=0).unsqueeze(1)).squeeze(1)
    return ids_T.where(rank_T >= 0, -1)


def _check_cut(x_TV: Tensor, cut: Cut) -> None:
    check_per_row(x_TV, top_k=cut.top_k_T, top_p=cut.top_p_T, min_p=cut.min_p_T)
    if bool((cut.top_k_T < 0).any()):
        raise ValueError("top_k must be at least 0 (0: all) in every row")
    if not bool(((cut.top_p_T > 0) & (cut.top_p_T <= 1)).all()):
        raise ValueError("top_p must be above 0 and at most 1 in every row")
    if not bool(((cut.min_p_T >= 0) & (cut.min_p_T <= 1)).all()):
        raise ValueError("min_p must be in [0, 1] in every row")
