"""The reference backend: every operator in torch, on any device and dtype. It defines what the others compute."""

from typing import cast

import torch
from torch import Tensor

from tokenrouter.kernels.attention import reference as attention_reference
from tokenrouter.kernels.base import KernelSet
from tokenrouter.kernels.checks import check_packed
from tokenrouter.kernels.draw import reference as draw_reference
from tokenrouter.kernels.draw_cut import reference as draw_cut_reference
from tokenrouter.kernels.int4_matmul import reference as int4_matmul_reference
from tokenrouter.kernels.int8_matmul import reference as int8_matmul_reference
from tokenrouter.kernels.int8_weight_matmul import reference as int8_weight_matmul_reference
from tokenrouter.kernels.matmul import reference as matmul_reference
from tokenrouter.kernels.quantize_rows import reference as quantize_rows_reference
from tokenrouter.kernels.rms_norm import reference as rms_norm_reference
from tokenrouter.kernels.rope_store_kv import reference as rope_store_kv_reference
from tokenrouter.kernels.routed_matmul import reference as routed_matmul_reference
from tokenrouter.kernels.router_mlp import reference as router_mlp_reference
from tokenrouter.kernels.row_max import reference as row_max_reference
from tokenrouter.kernels.silu_mul import reference as silu_mul_reference
from tokenrouter.kernels.values import (
    AttentionPlan,
    Cut,
    Int8Entries,
    PackedWeights,
    Product,
    QuantizedRows,
    RouterTable,
)
from tokenrouter.types import AttentionBatch, BlockMeans, SparseRows

PackedInt4 = int4_matmul_reference.PackedInt4
PackedInt8 = int8_matmul_reference.PackedInt8
PackedMatmul = matmul_reference.PackedMatmul


class ReferenceKernels(KernelSet):
    """See KernelSet; shapes and sources stand at each ``kernels/<op>/reference.py``."""

    name = "reference"

    def rms_norm(
        self,
        x_TE: Tensor,
        weight_E: Tensor,
        eps: float,
        *,
        residual_TE: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See KernelSet."""
        return rms_norm_reference.rms_norm(x_TE, weight_E, eps, residual_TE=residual_TE, out=out)

    def rms_norm_quantize(
        self,
        x_TE: Tensor,
        weight_E: Tensor,
        eps: float,
        *,
        residual_TE: Tensor | None = None,
        out: QuantizedRows | None = None,
    ) -> QuantizedRows:
        """See KernelSet."""
        return self.quantize_rows(
            self.rms_norm(x_TE, weight_E, eps, residual_TE=residual_TE), out=out
        )

    def quantize_rows(self, x_TK: Tensor, *, out: QuantizedRows | None = None) -> QuantizedRows:
        """See KernelSet."""
        return quantize_rows_reference.quantize_rows(x_TK, out=out)

    def silu_mul(self, gate_up_TJ: Tensor, *, out: Tensor | None = None) -> Tensor:
        """See KernelSet."""
        return silu_mul_reference.silu_mul(gate_up_TJ, out=out)

    def pack_matmul(
        self, weight_NK: Tensor, bias_N: Tensor | None, *, gated: bool = False
    ) -> PackedWeights:
        """See KernelSet."""
        return matmul_reference.pack(weight_NK, bias_N, gated=gated)

    def matmul(
        self,
        x_TK: Tensor,
        packed: PackedWeights,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """See KernelSet."""
        dense = check_packed(Product.DENSE, packed, PackedMatmul)
        return matmul_reference.matmul(x_TK, dense, out=out, accumulate=accumulate)

    def pack_int8(
        self, weight_NK: Tensor, bias_N: Tensor | None, *, gated: bool = False
    ) -> PackedWeights:
        """See KernelSet."""
        return int8_matmul_reference.pack(weight_NK, bias_N, gated=gated)

    def int8_matmul(
        self,
        rows: QuantizedRows,
        packed: PackedWeights,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """See KernelSet."""
        int8 = check_packed(Product.INT8, packed, PackedInt8)
        return int8_matmul_reference.int8_matmul(rows, int8, out=out, accumulate=accumulate)

    def int8_weight_matmul(
        self,
        x_TK: Tensor,
        packed: PackedWeights,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """See KernelSet."""
        int8 = check_packed(Product.INT8_WEIGHT, packed, PackedInt8)
        return int8_weight_matmul_reference.int8_weight_matmul(
            x_TK, int8, out=out, accumulate=accumulate
        )

    def pack_int4(
        self, weight_NK: Tensor, bias_N: Tensor | None, *, gated: bool = False
    ) -> PackedWeights:
        """See KernelSet."""
        return int4_matmul_reference.pack(weight_NK, bias_N, gated=gated)

    def int4_matmul(
        self,
        rows: QuantizedRows,
        packed: PackedWeights,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """See KernelSet."""
        int4 = check_packed(Product.INT4, packed, PackedInt4)
        return int4_matmul_reference.int4_matmul(rows, int4, out=out, accumulate=accumulate)

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
        if not isinstance(high, PackedInt8):
            high = check_packed(Product.DENSE, high, PackedMatmul)
        low_int8 = check_packed(Product.INT8, low_packed, PackedInt8)
        return routed_matmul_reference.routed_matmul(
            self, high_TK, high, low, low_int8, out=out, accumulate=accumulate
        )

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
        return rope_store_kv_reference.rope_store_kv(
            qkv_TO, cos_TD, sin_TD, slots_T, kv_SPD, int8=int8, out=out
        )

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
        return attention_reference.plan(
            batch,
            num_slots=num_slots,
            scale=scale,
            dtype=dtype,
            window=window,
            num_observed_B=num_observed_B,
            num_int8=num_int8,
            sparse=sparse,
        )

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
        reference_plan = cast(attention_reference.ReferencePlan, plan)
        return attention_reference.run(
            q_THD, kv_SPD, reference_plan, out=out, received=received, int8=int8
        )

    def row_max(self, x_TV: Tensor) -> tuple[Tensor, Tensor]:
        """See KernelSet."""
        return row_max_reference.row_max(x_TV)

    def draw(self, x_TV: Tensor, inverse_temperature_T: Tensor, uniform_T: Tensor) -> Tensor:
        """See KernelSet."""
        return draw_reference.draw(x_TV, inverse_temperature_T, uniform_T)

    def draw_cut(
        self, x_TV: Tensor, inverse_temperature_T: Tensor, uniform_T: Tensor, cut: Cut
    ) -> Tensor:
        """See KernelSet."""
        return draw_cut_reference.draw_cut(x_TV, inverse_temperature_T, uniform_T, cut)

    def router_mlp(
        self, values_TF: Tensor, ids_T: Tensor, phase_T: Tensor, table: RouterTable
    ) -> Tensor:
        """See KernelSet."""
        return router_mlp_reference.router_mlp(values_TF, ids_T, phase_T, table)
