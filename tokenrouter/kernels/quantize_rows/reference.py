"""Symmetric int8 quantisation of rows, one scale per row (a token never depends on its batch mates).

T rows, K features. Memory bound: reads T x K twice, writes T x K bytes.
"""

import torch
from torch import Tensor

from tokenrouter.kernels.checks import check_rows
from tokenrouter.kernels.values import QuantizedRows, scale_dtype

SMALLEST_SCALE = 1e-35  # keeps a row of zeros at zero


def quantize_rows(x_TK: Tensor, *, out: QuantizedRows | None = None) -> QuantizedRows:
    """Quantises each row of ``x_TK`` (any float dtype) by its largest magnitude, rounding half to even.

    The scale is rounded to its dtype first, and its reciprocal multiplies in float32: what divides is exactly what
    ``int8_matmul`` multiplies by.

    Raises:
        ValueError: not two dimensions, or no features.
    """
    check_rows(x_TK)
    x_f32_TK = x_TK.float()
    scale_T1 = (
        (x_f32_TK.abs().amax(-1, keepdim=True) * (1 / 127))
        .clamp_min_(SMALLEST_SCALE)
        .to(scale_dtype(x_TK.dtype))
    )
    q_TK = (x_f32_TK * scale_T1.float().reciprocal()).round_().to(torch.int8)
    if out is None:
        return QuantizedRows(q_TK, scale_T1, x_TK.dtype)
    out.q_TK.copy_(q_TK)
    out.scale_T1.copy_(scale_T1)
    return out
