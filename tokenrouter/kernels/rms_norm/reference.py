"""Root-mean-square normalisation of rows (Zhang and Sennrich 2019, arXiv:1910.07467).

T rows, E features. Memory bound: reads and writes T x E values.
"""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``, statistics in float32.

    Args:
        x_TE: any float dtype; any number of leading dimensions.
        weight_E: same dtype.
        eps: added to the mean square.

    Returns:
        A new tensor of ``x``'s shape and dtype.
    """
    return F.rms_norm(x_TE, weight_E.shape, weight_E, eps)
