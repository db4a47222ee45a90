"""W8A8 product: int8 rows times int8 weights, int32 accumulation, scales per row and per output channel.

T rows, K inputs, N outputs. The accumulator is exact, so a token's result is the same bit for bit in any batch.

Two implementations give the same result: oneDNN's prepacked int8 linear, which applies the channel scales in its
epilogue and reads weights in blocked order (1.2 to 2 times ``torch._int_mm`` at 16 to 1024 rows on a processor with
AMX), and ``torch._int_mm`` with the scales after it. The first is used where a probe at packing finds it exact: on
processors without VNNI its products may saturate at 16 bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tokenrouter.kernels.quantize_rows.reference import QuantizedRows


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedInt8:
    """Int8 weights in the layout that ``int8_matmul`` reads.

    Attributes:
        weight: int8 ``[N, K]``, or oneDNN's opaque tensor when ``blocked``.
        scale_N: float32 scale per output channel.
        zero_N: int32 zeros (oneDNN asks for zero points).
        bias_N: in the weight's original dtype, or None.
        blocked: which of the two layouts.
    """

    weight: Tensor
    scale_N: Tensor
    zero_N: Tensor
    bias_N: Tensor | None
    blocked: bool


@cache
def _blocked_linear() -> Callable[..., Tensor]:
    """The overload itself: looking it up by name at every call costs more than a small product."""
    overload: Callable[..., Tensor] = torch.ops.onednn.qlinear_pointwise.default
    return overload


def _onednn(q_TK: Tensor, packed: PackedInt8, dtype: torch.dtype) -> Tensor:
    return _blocked_linear()(
        q_TK,
        1.0,
        0,
        packed.weight,
        packed.scale_N,
        packed.zero_N,
        None,
        1.0,
        0,
        dtype,
        "none",
        [],
        "",
    )


@cache
def _onednn_is_exact() -> bool:
    """Whether oneDNN's int8 linear exists here and accumulates extreme values without saturating."""
    if not torch.backends.mkldnn.is_available():
        return False
    weight_NK = torch.full((32, 64), 127, dtype=torch.int8)
    weight_NK[::2] = -127
    ones_N = torch.ones(32)
    try:
        blocked = torch.ops.onednn.qlinear_prepack(weight_NK, None)
        packed = PackedInt8(
            weight=blocked, scale_N=ones_N, zero_N=ones_N.int() * 0, bias_N=None, blocked=True
        )
        for num_rows in (1, 5, 40):
            q_TK = torch.full((num_rows, 64), 127, dtype=torch.int8)
            q_TK[::2] = -127
            exact_TN = q_TK.float() @ weight_NK.float().t()
            if not torch.equal(_onednn(q_TK, packed, torch.float32), exact_TN):
                return False
    except (RuntimeError, AttributeError):
        return False
    return True


def pack(weight_NK: Tensor, bias_N: Tensor | None) -> PackedInt8:
    """Quantises ``weight_NK`` (any float dtype) symmetrically per output channel and packs it."""
    weight_f32_NK = weight_NK.float()
    scale_N = weight_f32_NK.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny * 128) / 127.0
    q_NK = (weight_f32_NK / scale_N[:, None]).round_().to(torch.int8)
    blocked = weight_NK.device.type == "cpu" and _onednn_is_exact()
    return PackedInt8(
        weight=torch.ops.onednn.qlinear_prepack(q_NK, None) if blocked else q_NK,
        scale_N=scale_N,
        zero_N=torch.zeros_like(scale_N, dtype=torch.int32),
        bias_N=bias_N,
        blocked=blocked,
    )


def int8_matmul(rows: QuantizedRows, packed: PackedInt8) -> Tensor:
    """``(q @ weight.T) * channel scale * row scale + bias``, a new ``[T, N]`` tensor in the rows' original dtype.

    Computed in the row scales' dtype: rounded to it after the channel scale and after the row scale.
    """
    dtype = rows.scale_T1.dtype
    if packed.blocked:
        y_TN = _onednn(rows.q_TK, packed, dtype)
    else:
        y_TN = (torch._int_mm(rows.q_TK, packed.weight.t()) * packed.scale_N).to(dtype)
    y_TN.mul_(rows.scale_T1)
    return (y_TN if packed.bias_N is None else y_TN.add_(packed.bias_N)).to(rows.dtype)
