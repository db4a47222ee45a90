"""Symmetric int8 rows on the GPU: one program per row, which it reads once.

T rows, K features. Roofline: ``T K (item + 1)`` bytes beside some ``4 T K`` operations: bound by memory.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from tokenrouter.kernels.checks import check_rows
from tokenrouter.kernels.quantize_rows.reference import SMALLEST_SCALE
from tokenrouter.kernels.triton.builds import Build
from tokenrouter.kernels.triton.launch import check_on_device, narrow, row_block
from tokenrouter.kernels.values import QuantizedRows


@triton.jit
def store_quantized(x_K, is_real_K, q_row, scale_at, SMALLEST: tl.constexpr):
    """Stores a row, given in float32 with zeros beyond its end; ``q_row`` and ``scale_at`` are pointers."""
    largest = tl.max(tl.abs(x_K), 0)
    largest = tl.where(tl.max((x_K != x_K).to(tl.int32), 0) > 0, float("nan"), largest)
    scale = narrow(
        tl.maximum(largest * (1 / 127), SMALLEST, tl.PropagateNan.ALL), scale_at.dtype.element_ty
    )
    tl.store(scale_at, scale)
    scaled_K = x_K * (1.0 / scale.to(tl.float32))
    # Half to even: 1.5 * 2^23 takes the fraction away as float32 adds.
    rounded_K = (scaled_K + 12582912.0) - 12582912.0
    tl.store(q_row, rounded_K.to(tl.int8), mask=is_real_K)


@triton.jit
def quantize_rows_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    x_stride,
    q_stride,
    width,
    BLOCK_K: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    columns_K = tl.arange(0, BLOCK_K)
    is_real_K = columns_K < width
    x_K = tl.load(x_ptr + row * x_stride + columns_K, mask=is_real_K, other=0.0).to(tl.float32)
    store_quantized(x_K, is_real_K, q_ptr + row * q_stride + columns_K, scale_ptr + row, SMALLEST)


def quantize_rows(x_TK: Tensor, *, out: QuantizedRows | None = None) -> QuantizedRows:
    """As ``quantize_rows.reference``, to the bit.

    Raises:
        ValueError: not two dimensions, no features or too many, or tensors that are not on a GPU.
    """
    check_rows(x_TK)
    num_rows, width = x_TK.shape
    out = QuantizedRows.empty(num_rows, width, x_TK.dtype, x_TK.device) if out is None else out
    check_on_device(x_TK, out.q_TK, out.scale_T1)
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    block = row_block(width, "rows")
    if num_rows:
        quantize_rows_kernel[(num_rows,)](
            x_TK,
            out.q_TK,
            out.scale_T1,
            x_TK.stride(0),
            out.q_TK.stride(0),
            width,
            BLOCK_K=block,
            SMALLEST=SMALLEST_SCALE,
            num_warps=4 if block <= 4096 else 8,
        )
    return out


def builds() -> Iterator[Build]:
    """Every pair of dtypes of rows and scales."""
    for x, scale in (("*bf16", "*bf16"), ("*fp16", "*fp32"), ("*fp32", "*fp32")):
        yield Build(
            name=f"quantize_rows {x[1:]}",
            kernel=quantize_rows_kernel,
            signature={
                "x_ptr": x,
                "q_ptr": "*i8",
                "scale_ptr": scale,
                "x_stride": "i32",
                "q_stride": "i32",
                "width": "i32",
            },
            aligned=("x_stride", "q_stride", "width"),
            constants={"BLOCK_K": 4096, "SMALLEST": SMALLEST_SCALE},
        )
