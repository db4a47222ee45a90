"""Dense product with weights packed once: ``x @ weight.T + bias`` in the weight's dtype.

T rows, K inputs, N outputs. On x86 with oneDNN, bfloat16 and float16 weights are reordered once into oneDNN's blocked
layout: an unpacked bfloat16 ``F.linear`` reorders them at every call, which costs more than the product at few rows.
Plain float32 stays with ``F.linear``, which is as fast or faster there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenrouter.kernels.checks import check_product, check_weights
from tokenrouter.kernels.silu_mul.reference import silu_mul


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMatmul:
    """Weights in the layout that ``matmul`` reads.

    Attributes:
        weight: ``[N, K]``, or oneDNN's opaque tensor of the same logical shape when ``blocked``.
        bias_N: same dtype as the weight where it is not blocked, or None.
        blocked: which of the two.
        gated: the product is gate and up side by side, and what is returned ``silu(gate) * up``.
    """

    weight: Tensor
    bias_N: Tensor | None
    blocked: bool
    gated: bool = False

    @property
    def num_outputs(self) -> int:
        """Of the product: ``N``, or half of it when gated."""
        return self.weight.shape[0] // (2 if self.gated else 1)


@cache
def _blocked_linear() -> Callable[..., Tensor]:
    """The overload itself: looking it up by name at every call costs more than a small product."""
    overload: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    return overload


def _can_block(weight_NK: Tensor) -> bool:
    if weight_NK.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight_NK.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight_NK.dtype == torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def pack(weight_NK: Tensor, bias_N: Tensor | None, *, gated: bool = False) -> PackedMatmul:
    """Packs ``weight_NK`` (any float dtype) for ``matmul``; the original is not modified.

    Raises:
        ValueError: see ``checks.check_weights``.
    """
    check_weights(weight_NK, bias_N, gated=gated)
    if _can_block(weight_NK):
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), None)
        return PackedMatmul(weight=blocked, bias_N=bias_N, blocked=True, gated=gated)
    if bias_N is not None:  # a blocked product takes a bias of another dtype as well
        bias_N = bias_N.to(weight_NK.dtype)
    return PackedMatmul(weight=weight_NK.contiguous(), bias_N=bias_N, blocked=False, gated=gated)


def matmul(
    x_TK: Tensor, packed: PackedMatmul, *, out: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """``x_TK`` (the weight's dtype) times the packed weight: ``[T, N]``, new, into or onto ``out``.

    Raises:
        ValueError: rows of another width or dtype, ``out`` of another shape, or ``accumulate`` without it.
    """
    check_product(x_TK, packed.weight.shape[1], packed.num_outputs, out, accumulate)
    if x_TK.dtype != packed.weight.dtype:
        raise ValueError(f"{packed.weight.dtype} weights need rows of it, got {x_TK.dtype}")
    if packed.blocked:
        y_TN: Tensor = _blocked_linear()(x_TK, packed.weight, packed.bias_N, "none", [], "")
    else:
        y_TN = F.linear(x_TK, packed.weight, packed.bias_N)
    if packed.gated:
        y_TN = silu_mul(y_TN)
    if out is None:
        return y_TN
    return out.add_(y_TN) if accumulate else out.copy_(y_TN)
