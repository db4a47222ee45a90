"""Symmetric int8 quantisation of rows, one scale per row (a token never depends on its batch mates).

T rows, K features. Memory bound: reads T x K twice, writes T x K bytes.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class QuantizedRows(NamedTuple):
    """``x ~ q_TK * scale_T1``: int8 values in -127 .. 127, float32 scales, and the dtype that ``x`` had."""

    q_TK: Tensor
    scale_T1: Tensor
    dtype: torch.dtype


def quantize_rows(x_TK: Tensor) -> QuantizedRows:
    """Quantises each row of ``x_TK`` (any float dtype) by its largest magnitude, rounding half to even.

    A row of zeros gets scale 0 and values 0.
    """
    amax_T1 = x_TK.abs().amax(-1, keepdim=True).float()
    inverse_T1 = 127.0 / amax_T1.clamp_min(torch.finfo(torch.float32).tiny * 128)
    q_TK = (x_TK * inverse_T1).round_().to(torch.int8)
    return QuantizedRows(q_TK, amax_T1 / 127.0, x_TK.dtype)
