"""One product for rows of two paths: high rows in full precision, low rows in int8.

T rows (high ones first), K inputs, N outputs. A native version passes over the output channels once: where both paths
read the same int8 weights, these are streamed once.
"""

from torch import Tensor

from tokenrouter.kernels.int8_matmul.reference import PackedInt8, int8_matmul
from tokenrouter.kernels.int8_weight_matmul.reference import int8_weight_matmul
from tokenrouter.kernels.matmul.reference import PackedMatmul, matmul
from tokenrouter.kernels.values import QuantizedRows


def routed_matmul(
    high_TK: Tensor,
    high: PackedMatmul | PackedInt8,
    low: QuantizedRows,
    low_packed: PackedInt8,
    *,
    out: Tensor,
    accumulate: bool = False,
) -> Tensor:
    """Rows of ``high_TK`` by ``high``, then rows of ``low`` by ``low_packed``, into ``out`` ``[T, N]``."""
    num_high = high_TK.shape[0]
    if isinstance(high, PackedInt8):
        int8_weight_matmul(high_TK, high, out=out[:num_high], accumulate=accumulate)
    else:
        matmul(high_TK, high, out=out[:num_high], accumulate=accumulate)
    int8_matmul(low, low_packed, out=out[num_high:], accumulate=accumulate)
    return out
