"""The W8A8 product on the GPU: int8 tiles, exact int32 sums, scales, bias and gate in the epilogue.

T rows, K inputs, N outputs. Roofline: ``2 T N K`` operations beside ``T K + N K + 2 T N`` bytes: bound by memory below
some 300 rows, by the int8 tensor cores above.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenrouter.kernels.checks import check_product
from tokenrouter.kernels.int8_matmul.reference import PackedInt8
from tokenrouter.kernels.triton.builds import Build, in_configs
from tokenrouter.kernels.triton.launch import check_on_device, choices, narrow
from tokenrouter.kernels.values import QuantizedRows


def _config(rows: int, outputs: int, inputs: int, warps: int, stages: int) -> triton.Config:
    blocks = {"BLOCK_T": rows, "BLOCK_N": outputs, "BLOCK_K": inputs}
    return triton.Config(blocks, num_warps=warps, num_stages=stages)


def _in_registers(
    configs: Sequence[triton.Config], arguments: Mapping[str, Any], **constants: Any
) -> list[triton.Config]:
    """A gated tile is two: the larger ones leave the registers."""
    gated = {**arguments, **constants}["GATED"]
    tile = 64 * 64 if gated else 128 * 128
    return [c for c in configs if c.kwargs["BLOCK_T"] * c.kwargs["BLOCK_N"] <= tile]


@triton.jit
def int8_sums(
    x_ptr,
    w_ptr,
    rows_T,
    outputs_N,
    x_stride,
    w_stride,
    num_rows,
    num_outputs,
    num_inputs,
    BLOCK_K: tl.constexpr,
):
    """Exact products of rows and weights, int32 ``[T, N]``; beyond their ends they count as zero."""
    inputs_K = tl.arange(0, BLOCK_K)
    x_at = x_ptr + rows_T[:, None].to(tl.int64) * x_stride + inputs_K[None, :]
    w_at = w_ptr + outputs_N[None, :].to(tl.int64) * w_stride + inputs_K[:, None]
    is_row_T1, is_output_1N = rows_T[:, None] < num_rows, outputs_N[None, :] < num_outputs
    sums_TN = tl.zeros((rows_T.shape[0], outputs_N.shape[0]), tl.int32)
    for start in range(0, num_inputs, BLOCK_K):
        left = num_inputs - start
        x_TK = tl.load(x_at, mask=is_row_T1 & (inputs_K[None, :] < left), other=0)
        w_KN = tl.load(w_at, mask=is_output_1N & (inputs_K[:, None] < left), other=0)
        sums_TN = tl.dot(x_TK, w_KN, sums_TN, out_dtype=tl.int32)
        x_at += BLOCK_K
        w_at += BLOCK_K
    return sums_TN


@triton.jit
def scaled(sums_TN, scale_T, scale_ptr, bias_ptr, outputs_N, num_outputs, HAS_BIAS: tl.constexpr):
    """Sums times the channels' and the rows' scales, and the bias, in float32 and the reference's order."""
    is_output_N = outputs_N < num_outputs
    scale_N = tl.load(scale_ptr + outputs_N, mask=is_output_N, other=0.0)
    y_TN = sums_TN.to(tl.float32) * scale_N[None, :] * scale_T[:, None]
    if HAS_BIAS:
        y_TN += tl.load(bias_ptr + outputs_N, mask=is_output_N, other=0.0).to(tl.float32)[None, :]
    return y_TN


@triton.jit
def store_tile(y_TN, out_at, is_real_TN, ACCUMULATE: tl.constexpr):
    """Writes a tile in ``out``'s dtype; or adds it, rounded first, as the reference does."""
    kept_TN = narrow(y_TN, out_at.dtype.element_ty)
    if ACCUMULATE:
        before_TN = tl.load(out_at, mask=is_real_TN, other=0.0).to(tl.float32)
        kept_TN = narrow(before_TN + kept_TN.to(tl.float32), out_at.dtype.element_ty)
    tl.store(out_at, kept_TN, mask=is_real_TN)


@triton.autotune(
    configs=choices(
        _config(16, 64, 128, 4, 4),
        _config(16, 128, 128, 4, 4),
        _config(32, 64, 128, 4, 4),
        _config(64, 64, 128, 4, 4),
        _config(64, 128, 128, 4, 3),
        _config(128, 128, 128, 8, 3),
    ),
    key=["row_class", "num_outputs", "num_inputs", "GATED"],
    prune_configs_by={"early_config_prune": _in_registers},
    restore_value=["out_ptr"],
)
@triton.jit
def int8_matmul_kernel(
    x_ptr,
    row_scale_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    out_stride,
    row_class,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of the result. ``num_outputs``: of the result; gated weights have as many up rows behind the gate rows."""
    rows_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    outputs_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row_T, is_output_N = rows_T < num_rows, outputs_N < num_outputs
    scale_T = tl.load(row_scale_ptr + rows_T, mask=is_row_T, other=0.0).to(tl.float32)
    sums_TN = int8_sums(
        x_ptr,
        w_ptr,
        rows_T,
        outputs_N,
        x_stride,
        num_inputs,
        num_rows,
        num_outputs,
        num_inputs,
        BLOCK_K,
    )
    y_TN = scaled(sums_TN, scale_T, scale_ptr, bias_ptr, outputs_N, num_outputs, HAS_BIAS)
    if GATED:
        up_ptr = w_ptr + tl.cast(num_outputs, tl.int64) * num_inputs
        sums_TN = int8_sums(
            x_ptr,
            up_ptr,
            rows_T,
            outputs_N,
            x_stride,
            num_inputs,
            num_rows,
            num_outputs,
            num_inputs,
            BLOCK_K,
        )
        up_TN = scaled(
            sums_TN,
            scale_T,
            scale_ptr + num_outputs,
            bias_ptr + num_outputs,
            outputs_N,
            num_outputs,
            HAS_BIAS,
        )
        y_TN = y_TN * tl.sigmoid(y_TN) * up_TN
    out_at = out_ptr + rows_T[:, None].to(tl.int64) * out_stride + outputs_N[None, :]
    store_tile(y_TN, out_at, is_row_T[:, None] & is_output_N[None, :], ACCUMULATE)


def int8_matmul(
    rows: QuantizedRows, packed: PackedInt8, *, out: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """As ``int8_matmul.reference``; the sums are equal, and so are the scaled ones but for a gate's exponential.

    Raises:
        ValueError: as there; tensors that are not on a GPU.
    """
    num_rows, num_inputs = rows.q_TK.shape
    check_product(rows.q_TK, packed.weight.shape[1], packed.num_outputs, out, accumulate)
    if rows.scale_T1.shape != (num_rows, 1):
        raise ValueError(f"scale must have shape {[num_rows, 1]}, got {list(rows.scale_T1.shape)}")
    if out is None:
        out = torch.empty(num_rows, packed.num_outputs, dtype=rows.dtype, device=rows.q_TK.device)
    check_on_device(rows.q_TK, packed.weight, out)
    if not num_rows:
        return out
    num_outputs = packed.num_outputs

    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(num_rows, meta["BLOCK_T"]), triton.cdiv(num_outputs, meta["BLOCK_N"])

    bias_N = packed.bias_N
    int8_matmul_kernel[grid](
        rows.q_TK,
        rows.scale_T1,
        packed.weight,
        packed.scale_N,
        packed.scale_N if bias_N is None else bias_N,
        out,
        num_rows,
        num_outputs,
        num_inputs,
        rows.q_TK.stride(0),
        out.stride(0),
        triton.next_power_of_2(num_rows),
        HAS_BIAS=bias_N is not None,
        GATED=packed.gated,
        ACCUMULATE=accumulate,
    )
    return out


def builds() -> Iterator[Build]:
    """bfloat16 rows in every configuration; in the first other dtypes, and one output: Triton makes a 1 a constant."""
    for out, gated in (("bf16", False), ("bf16", True), ("fp16", True), ("fp32", True)):
        scale = "*bf16" if out == "bf16" else "*fp32"
        pointers = {"x_ptr": "*i8", "row_scale_ptr": scale, "w_ptr": "*i8", "scale_ptr": "*fp32"}
        numbers = ("num_rows", "num_outputs", "num_inputs", "x_stride", "out_stride", "row_class")
        build = Build(
            name=f"int8_matmul {out}{' gated' if gated else ''}",
            kernel=int8_matmul_kernel,
            signature={
                **pointers,
                "bias_ptr": f"*{out}",
                "out_ptr": f"*{out}",
                **dict.fromkeys(numbers, "i32"),
            },
            constants={"HAS_BIAS": gated, "GATED": gated, "ACCUMULATE": False},
            aligned=("num_outputs", "num_inputs", "x_stride", "out_stride"),
        )
        first, *others = in_configs(build)
        yield first
        yield from others if out == "bf16" else ()
        signature = {name: of for name, of in first.signature.items() if name != "num_outputs"}
        constants = {**first.constants, "num_outputs": 1}
        yield replace(
            first, name=f"{first.name} one output", signature=signature, constants=constants
        )
