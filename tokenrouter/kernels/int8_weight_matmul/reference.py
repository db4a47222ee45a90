"""W8A16 product: full-precision rows times int8 weights with a scale per output channel.

T rows, K inputs, N outputs. At few rows it is bound by the stream of weights, half of the full-precision one.
"""

from torch import Tensor

from tokenrouter.kernels.checks import check_product
from tokenrouter.kernels.int8_matmul.reference import PackedInt8
from tokenrouter.kernels.silu_mul.reference import silu_mul


def int8_weight_matmul(
    x_TK: Tensor, packed: PackedInt8, *, out: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """``(x @ weight.T) * channel scale + bias``, ``[T, N]`` in the rows' dtype, accumulated and scaled in float32.

    Raises:
        ValueError: rows of another width, ``out`` of another shape, or ``accumulate`` without it.
    """
    check_product(x_TK, packed.weight.shape[1], packed.num_outputs, out, accumulate)
    y_TN = (x_TK.float() @ packed.weight.float().t()).mul_(packed.scale_N)
    if packed.bias_N is not None:
        y_TN.add_(packed.bias_N)
    if packed.gated:
        y_TN = silu_mul(y_TN)
    if out is None:
        return y_TN.to(x_TK.dtype)
    return out.add_(y_TN.to(x_TK.dtype)) if accumulate else out.copy_(y_TN)
