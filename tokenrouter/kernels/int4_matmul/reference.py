"""W4A8 product: int8 rows times 4-bit weights in groups of 32 inputs, int32 accumulation.

T rows, K inputs, N outputs, G groups of inputs, C codes (32 G: the inputs, padded to whole groups).

An output channel has a float32 scale, as in int8, and a group of its inputs a step and an offset, 8-bit integers in
units of that scale: a weight is ``(code * step + offset) * scale``, 4.5 bits in all. So weights become int8 without
rounding, the product is that of int8 to the bit, and a token's result is the same in any batch. These are QServe's
progressive groups (Lin et al. 2024, arXiv:2405.04532).

Asymmetric, by the relative error of weights, ``|rounded - weight| / |weight|``, 1024 x 576, in %:

| format of a group | bits | Gaussian | Student's t, 5 degrees | Gaussian, 3 inputs 8 times as large |
|---|---:|---:|---:|---:|
| symmetric, codes -7 .. 7, 16-bit scale | 4.5 | 9.7 | 12.2 | 12.5 |
| symmetric, codes -8 .. 7, the largest weight at -8 | 4.5 | 8.6 | 10.7 | 11.1 |
| asymmetric, 16-bit scale and minimum | 5 | 7.8 | 9.0 | 9.0 |
| asymmetric, integer step next to the range's | 4.5 | 7.8 | 9.1 | 9.5 |

Integers cost most where a few inputs of a channel are much larger than the others: its scale is then theirs.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokenrouter.kernels.checks import check_weights
from tokenrouter.kernels.int8_matmul.reference import (
    PackedInt8,
    channel_scale,
    int8_matmul,
)
from tokenrouter.kernels.values import QuantizedRows

GROUP = 32
LEVELS = 15
WEIGHTS_AT_ONCE = (
    2**22
)  # are quantised together, so that intermediates stay small beside the weights


class Codes(NamedTuple):
    """4-bit weights: ``(code * step + offset) * scale``.

    Attributes:
        code_NC: uint8, 0 .. 15. The last group is filled up with codes whose activations are zero.
        step_NG: uint8, 0 .. 17: ``code * step`` is at most 255.
        offset_NG: int8, -127 .. 127.
        scale_N: float32.
    """

    code_NC: Tensor
    step_NG: Tensor
    offset_NG: Tensor
    scale_N: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedInt4:
    """4-bit weights.

    Attributes:
        weight: uint8 ``[N, C / 2]``, two codes a byte, the even one in the low bits.
        step_NG, offset_NG, scale_N: see ``Codes``.
        bias_N: in the original weight's dtype, or None.
        num_inputs: ``K``.
        gated: the product is gate and up side by side, and what is returned ``silu(gate) * up``.
    """

    weight: Tensor
    step_NG: Tensor
    offset_NG: Tensor
    scale_N: Tensor
    bias_N: Tensor | None
    num_inputs: int
    gated: bool = False


def quantize_weight(weight_NK: Tensor) -> Codes:
    """4-bit codes of ``weight_NK`` (any float dtype): of a group's two integer steps next to its range the better one.

    Raises:
        ValueError: more inputs than int32 sums have room for.
    """
    parts = weight_NK.split(max(1, WEIGHTS_AT_ONCE // weight_NK.shape[1]))
    return Codes(*map(torch.cat, zip(*map(_quantize, parts), strict=True)))


def _quantize(weight_NK: Tensor) -> Codes:
    scale_N = channel_scale(weight_NK)
    wide_NK = weight_NK.float() / scale_N[:, None]
    padding = wide_NK[:, -1:].expand(-1, -wide_NK.shape[1] % GROUP)
    group_NGK = torch.cat((wide_NK, padding), 1).unflatten(1, (-1, GROUP))
    low_NG1, high_NG1 = group_NGK.amin(2, keepdim=True), group_NGK.amax(2, keepdim=True)
    exact_NG1, middle_NG1 = (high_NG1 - low_NG1) / LEVELS, (low_NG1 + high_NG1) / 2
    below, above = (
        _encode(group_NGK, step_NG1, middle_NG1)
        for step_NG1 in (exact_NG1.floor(), exact_NG1.ceil())
    )
    is_above_NG1 = above.error_NG1 < below.error_NG1
    code_NGK, step_NG1, offset_NG1 = (
        torch.where(is_above_NG1, one, other)
        for one, other in zip(above[:3], below[:3], strict=True)
    )
    return Codes(
        code_NGK.flatten(1).to(torch.uint8),
        step_NG1[:, :, 0].to(torch.uint8),
        offset_NG1[:, :, 0].to(torch.int8),
        scale_N,
    )


class _Encoded(NamedTuple):
    code_NGK: Tensor
    step_NG1: Tensor
    offset_NG1: Tensor
    error_NG1: Tensor


def _encode(group_NGK: Tensor, step_NG1: Tensor, middle_NG1: Tensor) -> _Encoded:
    """Codes around a group's middle by whole steps, none of which leads above 127, and the squared error."""
    offset_NG1 = (middle_NG1 - step_NG1 * (LEVELS / 2)).round_().clamp_(-127, 127)
    by_NG1 = step_NG1.clamp_min(1)
    last_NG1 = ((127 - offset_NG1) / by_NG1).floor_().clamp_max_(LEVELS)
    code_NGK = ((group_NGK - offset_NG1) / by_NG1).round_().clamp_min_(0).minimum(last_NG1)
    error_NG1 = (code_NGK * step_NG1 + offset_NG1 - group_NGK).square_().sum(2, keepdim=True)
    return _Encoded(code_NGK, step_NG1, offset_NG1, error_NG1)


def expand(codes: Codes, num_inputs: int) -> Tensor:
    """The int8 weights ``[N, K]`` that codes stand for, in units of ``scale_N``."""
    code_NGK = codes.code_NC.unflatten(1, (-1, GROUP)).to(torch.int16)
    value_NGK: Tensor = code_NGK * codes.step_NG[:, :, None] + codes.offset_NG[:, :, None]
    return value_NGK.flatten(1)[:, :num_inputs].to(torch.int8)


def pack(weight_NK: Tensor, bias_N: Tensor | None, *, gated: bool = False) -> PackedInt4:
    """Quantises ``weight_NK``.

    Raises:
        ValueError: see ``checks.check_weights`` and ``quantize_weight``.
    """
    check_weights(weight_NK, bias_N, gated=gated)
    code_NC, step_NG, offset_NG, scale_N = quantize_weight(weight_NK)
    return PackedInt4(
        weight=code_NC[:, ::2] | code_NC[:, 1::2] << 4,
        step_NG=step_NG,
        offset_NG=offset_NG,
        scale_N=scale_N,
        bias_N=bias_N,
        num_inputs=weight_NK.shape[1],
        gated=gated,
    )


def int4_matmul(
    rows: QuantizedRows, packed: PackedInt4, *, out: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """``int8_matmul`` of ``rows`` by what the codes stand for: ``[T, N]``.

    Raises:
        ValueError: rows or scales of another shape, ``out`` of another shape, or ``accumulate`` without it.
    """
    code_NC = torch.stack((packed.weight & 15, packed.weight >> 4), 2).flatten(1)
    codes = Codes(code_NC, packed.step_NG, packed.offset_NG, packed.scale_N)
    expanded = PackedInt8(
        weight=expand(codes, packed.num_inputs),
        scale_N=packed.scale_N,
        bias_N=packed.bias_N,
        gated=packed.gated,
    )
    return int8_matmul(rows, expanded, out=out, accumulate=accumulate)
