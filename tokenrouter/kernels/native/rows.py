"""The row-wise operators of the native backend, and the learned router's score."""

from typing import Any

import torch
from torch import Tensor

from tokenrouter.kernels.checks import check_gate_up, check_rows
from tokenrouter.kernels.reference import ReferenceKernels
from tokenrouter.kernels.values import Cut, QuantizedRows, RouterTable

DTYPES = (torch.bfloat16, torch.float32)


class NativeRows(ReferenceKernels):
    """See KernelSet. What the compiled module does not have is inherited from the reference."""

    def __init__(self, module: Any) -> None:
        """``module`` is what ``build.load`` returned."""
        self._module = module

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
        out = torch.empty(x_TE.shape, dtype=x_TE.dtype) if out is None else out
        self._module.rms_norm(x_TE, weight_E, eps, out, residual_TE)
        return out

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
        if out is None:
            check_rows(x_TE)
            out = QuantizedRows.empty(x_TE.shape[0], x_TE.shape[1], x_TE.dtype)
        self._module.rms_norm_quantize(x_TE, weight_E, eps, out.q_TK, out.scale_T1, residual_TE)
        return out

    def quantize_rows(self, x_TK: Tensor, *, out: QuantizedRows | None = None) -> QuantizedRows:
        """See KernelSet."""
        if out is None:
            check_rows(x_TK)
            out = QuantizedRows.empty(x_TK.shape[0], x_TK.shape[1], x_TK.dtype)
        self._module.quantize_rows(x_TK, out.q_TK, out.scale_T1)
        return out

    def silu_mul(self, gate_up_TJ: Tensor, *, out: Tensor | None = None) -> Tensor:
        """See KernelSet."""
        if out is None:
            check_gate_up(gate_up_TJ)
            out = gate_up_TJ.new_empty(gate_up_TJ.shape[0], gate_up_TJ.shape[1] // 2)
        self._module.silu_mul(gate_up_TJ, out)
        return out

    def row_max(self, x_TV: Tensor) -> tuple[Tensor, Tensor]:
        """See KernelSet."""
        if x_TV.dtype not in DTYPES:
            return super().row_max(x_TV)
        values_T, ids_T = self._module.row_max(x_TV)
        return values_T, ids_T

    def draw(self, x_TV: Tensor, inverse_temperature_T: Tensor, uniform_T: Tensor) -> Tensor:
        """See KernelSet."""
        if x_TV.dtype not in DTYPES:
            return super().draw(x_TV, inverse_temperature_T, uniform_T)
        ids_T: Tensor = self._module.draw(x_TV, inverse_temperature_T, uniform_T)
        return ids_T

    def draw_cut(
        self, x_TV: Tensor, inverse_temperature_T: Tensor, uniform_T: Tensor, cut: Cut
    ) -> Tensor:
        """See KernelSet. Another index than the reference's only where a share lies within 1e-6 of a border."""
        if x_TV.dtype not in DTYPES:
            return super().draw_cut(x_TV, inverse_temperature_T, uniform_T, cut)
        ids_T: Tensor = self._module.draw_cut(x_TV, inverse_temperature_T, uniform_T, *cut)
        return ids_T

    def router_mlp(
        self, values_TF: Tensor, ids_T: Tensor, phase_T: Tensor, table: RouterTable
    ) -> Tensor:
        """See KernelSet. Where gradients are asked for, the reference runs."""
        bins, table_KC, head_PH, *vocabulary = table
        if torch.is_grad_enabled() and (table_KC.requires_grad or head_PH.requires_grad):
            return super().router_mlp(values_TF, ids_T, phase_T, table)
        score_T: Tensor = self._module.router_mlp(
            values_TF, ids_T, phase_T, *bins, table_KC, head_PH, *vocabulary
        )
        return score_T
