"""Root-mean-square normalisation of rows (Zhang and Sennrich 2019, arXiv:1910.07467).

T rows, E features. Memory bound: reads and writes T x E values.
"""

import torch.nn.functional as F
from torch import Tensor

from tokenrouter.kernels.checks import check_norm


def rms_norm(
    x_TE: Tensor,
    weight_E: Tensor,
    eps: float,
    *,
    residual_TE: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``, statistics in float32.

    Args:
        x_TE: any float dtype; two or three dimensions.
        weight_E: same dtype.
        eps: added to the mean square.
        residual_TE: x is added to it in place first, and what is normed is the sum.
        out: where the result goes; may be ``x_TE``.

    Returns:
        ``out``, or a new tensor of ``x``'s shape and dtype.

    Raises:
        ValueError: another number of dimensions, or a weight of another width.
    """
    check_norm(x_TE, weight_E)
    if residual_TE is not None:
        x_TE = residual_TE.add_(x_TE)
    normed_TE = F.rms_norm(x_TE, weight_E.shape, weight_E, eps)
    return normed_TE if out is None else out.copy_(normed_TE)
