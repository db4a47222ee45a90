"""Symmetric int8 quantisation of rows, one scale per row (a token never depends on its batch mates).

T rows, K features. Memory bound: reads T x K twice, writes T x K bytes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST_SCALE = 1e-35  # keeps a row of zeros at zero


class QuantizedRows(NamedTuple):
    """``x ~ q_TK * scale_T1``: int8 values in -127 .. 127, a scale per row, and the dtype of ``x``.

    The scales are bfloat16 for a bfloat16 ``x``, else float32 (float16 has no room for small ones).
    """

    q_TK: Tensor
    scale_T1: Tensor
    dtype: torch.dtype


def quantize_rows(x_TK: Tensor) -> QuantizedRows:
    """Quantises each row of ``x_TK`` (any float dtype) by its largest magnitude, rounding half to even.

    The scale is rounded to its dtype before the division, which is done in float32: what divides is exactly what
    ``int8_matmul`` multiplies by. Operators on a single dtype are several times faster than mixed ones.
    """
    scale_dtype = torch.bfloat16 if x_TK.dtype == torch.bfloat16 else torch.float32
    scale_T1 = (x_TK.abs().amax(-1, keepdim=True).to(scale_dtype) * (1 / 127)).clamp_min_(
        SMALLEST_SCALE
    )
    x_f32_TK = x_TK.float() if x_TK.dtype != torch.float32 else x_TK.clone()  # divided in place
    return QuantizedRows(
        x_f32_TK.div_(scale_T1.float()).round_().to(torch.int8), scale_T1, x_TK.dtype
    )
