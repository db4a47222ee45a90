"""One product for rows of two paths: high rows in full precision, low rows in int8.

T rows (high ones first), K inputs, N outputs. A native version passes over the output channels once: where both paths
read the same int8 weights, these are streamed once.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from tokenrouter.kernels.int8_matmul.reference import PackedInt8
from tokenrouter.kernels.matmul.reference import PackedMatmul
from tokenrouter.kernels.values import QuantizedRows

if TYPE_CHECKING:
    from tokenrouter.kernels.base import KernelSet


def routed_matmul(
    kernels: "KernelSet",
    high_TK: Tensor,
    high: PackedMatmul | PackedInt8,
    low: QuantizedRows,
    low_packed: PackedInt8,
    *,
    out: Tensor,
    accumulate: bool = False,
) -> Tensor:
    """Rows of ``high_TK`` by ``high``, then rows of ``low`` by ``low_packed``, into ``out`` ``[T, N]``.

    By the products of ``kernels``.
    """
    num_high = high_TK.shape[0]
    product = kernels.int8_weight_matmul if isinstance(high, PackedInt8) else kernels.matmul
    product(high_TK, high, out=out[:num_high], accumulate=accumulate)
    kernels.int8_matmul(low, low_packed, out=out[num_high:], accumulate=accumulate)
    return out
