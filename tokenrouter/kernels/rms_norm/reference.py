"""Root-mean-square normalisation of rows (Zhang and Sennrich 2019, arXiv:1910.07467).

T rows, E features. Bytes: two passes over T x E; compute bound nowhere.
"""

import torch
from torch import Tensor


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``, statistics in float32, rounded once before the weight as transformers do.

    Args:
        x_TE: any float dtype; any number of leading dimensions.
        weight_E: same dtype.
        eps: added to the mean square.

    Returns:
        A new tensor of ``x``'s shape and dtype.
    """
    norm_T1 = torch.linalg.vector_norm(x_TE, 2, -1, keepdim=True, dtype=torch.float32)
    scale_T1 = norm_T1.square_().mul_(1.0 / x_TE.shape[-1]).add_(eps).rsqrt_()
    return (x_TE * scale_T1).to(x_TE.dtype).mul_(weight_E)
