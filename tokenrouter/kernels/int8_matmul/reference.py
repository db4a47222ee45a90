"""W8A8 product: int8 rows times int8 weights, int32 accumulation, scales per row and per output channel.

T rows, K inputs, N outputs. The accumulator is exact, so a token's result is the same bit for bit in any batch. The
scales are LLM.int8's vector-wise ones (Dettmers et al. 2022, arXiv:2208.07339).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenrouter.kernels.checks import MAX_INT8_INPUTS, check_product, check_weights
from tokenrouter.kernels.silu_mul.reference import silu_mul
from tokenrouter.kernels.values import QuantizedRows


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedInt8:
    """Int8 weights.

    Attributes:
        weight: int8 ``[N, K]``.
        scale_N: float32 scale per output channel.
        bias_N: in the original weight's dtype, or None.
        gated: the product is gate and up side by side, and what is returned ``silu(gate) * up``.
    """

    weight: Tensor
    scale_N: Tensor
    bias_N: Tensor | None
    gated: bool = False

    @property
    def num_outputs(self) -> int:
        """Of the product: ``N``, or half of it when gated."""
        return self.weight.shape[0] // (2 if self.gated else 1)


def channel_scale(weight_NK: Tensor) -> Tensor:
    """Float32 scales ``[N]`` by which the largest weight of an output channel is 127.

    Raises:
        ValueError: more inputs than int32 sums have room for.
    """
    if weight_NK.shape[1] > MAX_INT8_INPUTS:
        raise ValueError(
            f"weight has {weight_NK.shape[1]} inputs, int8 products have 32-bit sums for at most {MAX_INT8_INPUTS}: "
            "use pack_matmul"
        )
    largest_N = weight_NK.float().abs().amax(1)
    return largest_N.clamp_min(torch.finfo(torch.float32).tiny * 128) / 127.0


def quantize_weight(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 ``[N, K]`` and float32 scales ``[N]`` of ``weight_NK`` (any float dtype), per output channel.

    Raises:
        ValueError: more inputs than int32 sums have room for.
    """
    scale_N = channel_scale(weight_NK)
    return (weight_NK.float() / scale_N[:, None]).round_().to(torch.int8), scale_N


def pack(weight_NK: Tensor, bias_N: Tensor | None, *, gated: bool = False) -> PackedInt8:
    """Quantises ``weight_NK``.

    Raises:
        ValueError: see ``checks.check_weights`` and ``quantize_weight``.
    """
    check_weights(weight_NK, bias_N, gated=gated)
    q_NK, scale_N = quantize_weight(weight_NK)
    return PackedInt8(weight=q_NK, scale_N=scale_N, bias_N=bias_N, gated=gated)


def int8_matmul(
    rows: QuantizedRows, packed: PackedInt8, *, out: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """``(q @ weight.T) * channel scale * row scale + bias`` in float32, then the rows' dtype: ``[T, N]``.

    Raises:
        ValueError: rows or scales of another shape, ``out`` of another shape, or ``accumulate`` without it.
    """
    check_product(rows.q_TK, packed.weight.shape[1], packed.num_outputs, out, accumulate)
    if rows.scale_T1.shape != (rows.q_TK.shape[0], 1):
        raise ValueError(
            f"scale must have shape {[rows.q_TK.shape[0], 1]}, got {list(rows.scale_T1.shape)}"
        )
    if rows.q_TK.shape[1] == 1:  # _int_mm takes a single column for something else
        sums_TN = rows.q_TK.int() * packed.weight.t().int()
    else:
        sums_TN = torch._int_mm(rows.q_TK, packed.weight.t())
    y_TN = sums_TN * packed.scale_N
    y_TN.mul_(rows.scale_T1)
    if packed.bias_N is not None:
        y_TN.add_(packed.bias_N)
    if packed.gated:
        y_TN = silu_mul(y_TN)
    if out is None:
        return y_TN.to(rows.dtype)
    return out.add_(y_TN.to(rows.dtype)) if accumulate else out.copy_(y_TN)
