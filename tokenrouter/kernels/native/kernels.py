"""The native backend: C++ on the CPU, for bfloat16 and float32, with the instruction set chosen at run time.

Products of bfloat16 and int8 rows are ours; a dense float32 product is torch's (MKL is as fast as the cores allow).
"""

from dataclasses import astuple
from typing import Any, cast

import torch
from torch import Tensor

from tokenrouter.kernels.checks import (
    check_accumulate,
    check_plan,
    check_weights,
    num_query_heads,
    wrong_format,
)
from tokenrouter.kernels.int4_matmul import reference as int4_matmul_reference
from tokenrouter.kernels.int8_matmul.reference import quantize_weight
from tokenrouter.kernels.layer_tail import TailWeights
from tokenrouter.kernels.matmul import reference as matmul_reference
from tokenrouter.kernels.native.packed import NativePacked, handle_for, pack, pack_codes
from tokenrouter.kernels.native.rows import NativeRows
from tokenrouter.kernels.values import (
    AttentionPlan,
    Int8Entries,
    LayerTail,
    Norm,
    PackedWeights,
    Product,
    QuantizedRows,
)
from tokenrouter.types import AttentionBatch, BlockMeans, SparseRows


class NativeKernels(NativeRows):
    """See KernelSet. What the compiled module does not have is inherited from the reference."""

    name = "native"

    @property
    def isa(self) -> str:
        """The instruction set in use: plain, avx2, avx512 (with VNNI and bf16) or amx."""
        return str(self._module.isa())

    def limit_isa(self, name: str) -> str:
        """Uses at most ``name`` from now on, in the whole process; returns what is used. For tests and measurements."""
        return str(self._module.limit_isa(name))

    def pack_matmul(
        self, weight_NK: Tensor, bias_N: Tensor | None, *, gated: bool = False
    ) -> PackedWeights:
        """See KernelSet."""
        check_weights(weight_NK, bias_N, gated=gated)
        if weight_NK.dtype != torch.bfloat16:
            return matmul_reference.pack(weight_NK, bias_N, gated=gated)
        return pack(self._module, weight_NK, None, bias_N, gated=gated)

    def matmul(
        self,
        x_TK: Tensor,
        packed: PackedWeights,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """See KernelSet."""
        if not isinstance(packed, NativePacked):
            return super().matmul(x_TK, packed, out=out, accumulate=accumulate)
        handle = handle_for(Product.DENSE, packed)
        return self._product(x_TK, None, handle, x_TK.dtype, out, accumulate)

    def pack_int8(
        self, weight_NK: Tensor, bias_N: Tensor | None, *, gated: bool = False
    ) -> PackedWeights:
        """See KernelSet."""
        check_weights(weight_NK, bias_N, gated=gated)
        return pack(self._module, *quantize_weight(weight_NK), bias_N, gated=gated)

    def int8_matmul(
        self,
        rows: QuantizedRows,
        packed: PackedWeights,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """See KernelSet."""
        handle = handle_for(Product.INT8, packed)
        return self._product(rows.q_TK, rows.scale_T1, handle, rows.dtype, out, accumulate)

    def int8_weight_matmul(
        self,
        x_TK: Tensor,
        packed: PackedWeights,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """See KernelSet. A row is taken as two int8 rows: 16 bits of its largest magnitude."""
        handle = handle_for(Product.INT8_WEIGHT, packed)
        return self._product(x_TK, None, handle, x_TK.dtype, out, accumulate)

    def pack_int4(
        self, weight_NK: Tensor, bias_N: Tensor | None, *, gated: bool = False
    ) -> PackedWeights:
        """See KernelSet."""
        check_weights(weight_NK, bias_N, gated=gated)
        codes = int4_matmul_reference.quantize_weight(weight_NK)
        return pack_codes(self._module, codes, weight_NK.shape[1], bias_N, gated=gated)

    def int4_matmul(
        self,
        rows: QuantizedRows,
        packed: PackedWeights,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """See KernelSet. Panels become int8 ones in the caches, and the product is that of int8."""
        handle = handle_for(Product.INT4, packed)
        return self._product(rows.q_TK, rows.scale_T1, handle, rows.dtype, out, accumulate)

    def routed_matmul(
        self,
        high_TK: Tensor,
        high: PackedWeights,
        low: QuantizedRows,
        low_packed: PackedWeights,
        *,
        out: Tensor,
        accumulate: bool = False,
    ) -> Tensor:
        """See KernelSet."""
        if not isinstance(high, NativePacked):
            handle_for(Product.INT8, low_packed)  # refused before anything is written
            num_high = high_TK.shape[0]
            self.matmul(high_TK, high, out=out[:num_high], accumulate=accumulate)
            self.int8_matmul(low, low_packed, out=out[num_high:], accumulate=accumulate)
            return out
        if high.form == "int4":
            raise wrong_format(Product.DENSE, high.form)
        low_handle = handle_for(Product.INT8, low_packed)
        self._module.routed_matmul(
            high_TK, high.handle, low.q_TK, low.scale_T1, low_handle, out, accumulate
        )
        return out

    def project(
        self,
        product: Product,
        x_TK: Tensor,
        packed: PackedWeights,
        *,
        norm: Norm | None = None,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """See KernelSet."""
        if not isinstance(packed, NativePacked):
            return super().project(product, x_TK, packed, norm=norm, out=out, accumulate=accumulate)
        handle = handle_for(product, packed)
        check_accumulate(out, accumulate)
        if out is None:
            out = torch.empty(x_TK.shape[0], handle.n, dtype=x_TK.dtype)
        weight_E, eps = norm or (None, 0.0)
        self._module.project(x_TK, weight_E, eps, handle, product.quantizes_rows, out, accumulate)
        return out

    def layer_tail(self, product: Product, weights: TailWeights) -> LayerTail:
        """See KernelSet."""
        linears = (weights.out, weights.gate_up, weights.down, weights.next_qkv)
        packed = [w for w in linears if isinstance(w, NativePacked)]
        if len(packed) < len(linears) - (weights.next_qkv is None):
            return super().layer_tail(product, weights)
        out, gate_up, down, *following = [handle_for(product, w) for w in packed]
        tail: LayerTail = self._module.LayerTail(
            out,
            *weights.norm,
            gate_up,
            down,
            *(weights.next_norm or (None, 0.0)),
            following[0] if following else None,
            product.quantizes_rows,
        )
        return tail

    def rope_store_kv(
        self,
        qkv_TO: Tensor,
        cos_TD: Tensor,
        sin_TD: Tensor,
        slots_T: Tensor,
        kv_SPD: Tensor,
        *,
        int8: Int8Entries | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See KernelSet."""
        if out is None:
            num_heads = num_query_heads(qkv_TO, kv_SPD)
            out = qkv_TO.new_empty(qkv_TO.shape[0], num_heads, kv_SPD.shape[2])
        parts = int8 or (None, None)
        self._module.rope_store_kv(qkv_TO, cos_TD, sin_TD, slots_T, kv_SPD, out, *parts)
        return out

    def plan_attention(
        self,
        batch: AttentionBatch,
        *,
        num_slots: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        dtype: torch.dtype,
        window: int | None = None,
        num_observed_B: Tensor | None = None,
        num_int8: int = 0,
        sparse: SparseRows | None = None,
    ) -> AttentionPlan:
        """See KernelSet."""
        check_plan(window, num_slots, num_int8, sparse)
        plan: AttentionPlan = self._module.AttentionPlan(
            batch.query_rows_T,
            batch.num_queries_B,
            batch.query_start_B,
            batch.row_B,
            batch.num_keys_B,
            batch.slots_RN,
            batch.positions_RN,
            num_slots,
            num_int8,
            num_heads,
            num_kv_heads,
            head_dim,
            scale,
            window or 0,
            dtype == torch.bfloat16,
            num_observed_B,
            sparse and (*astuple(sparse.spec), sparse.is_sparse_T),
        )
        return plan

    def attention(
        self,
        q_THD: Tensor,
        kv_SPD: Tensor,
        plan: AttentionPlan,
        *,
        out: Tensor | None = None,
        received: Tensor | None = None,
        int8: Int8Entries | None = None,
        means: BlockMeans | None = None,
    ) -> Tensor:
        """See KernelSet."""
        if out is None:
            out = q_THD.new_empty(q_THD.shape[0], q_THD.shape[1:].numel())
        parts = *(int8 or (None, None)), *(means or (None, None))
        cast(Any, plan).run(q_THD, kv_SPD, out, received, *parts)
        return out

    def attend(
        self,
        qkv_TO: Tensor,
        cos_TD: Tensor,
        sin_TD: Tensor,
        slots_T: Tensor,
        kv_SPD: Tensor,
        plan: AttentionPlan,
        *,
        out: Tensor | None = None,
        received: Tensor | None = None,
        int8: Int8Entries | None = None,
        means: BlockMeans | None = None,
    ) -> Tensor:
        """See KernelSet."""
        if out is None:
            width = qkv_TO.shape[1] - kv_SPD.shape[1] * kv_SPD.shape[2]
            out = qkv_TO.new_empty(qkv_TO.shape[0], max(width, 0))
        parts = *(int8 or (None, None)), *(means or (None, None))
        cast(Any, plan).attend(qkv_TO, cos_TD, sin_TD, slots_T, kv_SPD, out, received, *parts)
        return out

    def _product(
        self,
        rows_TK: Tensor,
        scale_T1: Tensor | None,
        handle: Any,
        dtype: torch.dtype,
        out: Tensor | None,
        accumulate: bool,
    ) -> Tensor:
        check_accumulate(out, accumulate)
        out = torch.empty(rows_TK.shape[0], handle.n, dtype=dtype) if out is None else out
        self._module.matmul(rows_TK, scale_T1, handle, out, accumulate)
        return out
