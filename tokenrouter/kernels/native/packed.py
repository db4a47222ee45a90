"""Weights as the compiled products read them. N outputs, K inputs, I intermediate."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenrouter.kernels.checks import check_packed, wrong_format
from tokenrouter.kernels.int4_matmul.reference import Codes
from tokenrouter.kernels.values import PackedWeights, Product, WeightFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class NativePacked:
    """Weights in panels (``panel.h``), with scales and bias; ``handle`` is the compiled module's object."""

    handle: Any
    form: WeightFormat

    @property
    def weight(self) -> Tensor:
        """The panels' bytes."""
        data: Tensor = self.handle.data
        return data


def pack(
    module: Any,
    weight_NK: Tensor,
    scale_N: Tensor | None,
    bias_N: Tensor | None,
    *,
    gated: bool,
) -> NativePacked:
    """Panels of bfloat16 weights, or of int8 weights with ``scale_N``, which ``checks.check_weights`` accepted."""
    bias_N = None if bias_N is None else bias_N.float()
    outputs = 0
    if gated:
        outputs = weight_NK.shape[0] // 2
        weight_NK = _interleave(weight_NK)
        scale_N = None if scale_N is None else _interleave(scale_N)
        bias_N = None if bias_N is None else _interleave(bias_N)
    return NativePacked(
        handle=module.Weights(weight_NK, scale_N, bias_N, outputs),
        form="int8" if weight_NK.dtype == torch.int8 else "dense",
    )


def pack_codes(
    module: Any, codes: Codes, num_inputs: int, bias_N: Tensor | None, *, gated: bool
) -> NativePacked:
    """Panels of 4-bit weights of ``num_inputs`` inputs."""
    bias_N = None if bias_N is None else bias_N.float()
    outputs = 0
    if gated:
        outputs = codes.code_NC.shape[0] // 2
        codes = Codes(*map(_interleave, codes))
        bias_N = None if bias_N is None else _interleave(bias_N)
    return NativePacked(handle=module.Weights(*codes, bias_N, num_inputs, outputs), form="int4")


def handle_for(product: Product, packed: PackedWeights) -> Any:
    """The object that the compiled ``product`` takes; raises ValueError for another format or another backend's."""
    panels = check_packed(product, packed, NativePacked)
    if panels.form != product.weight_format:
        raise wrong_format(product, panels.form)
    return panels.handle


def _interleave(gate_up: Tensor) -> Tensor:
    """``[2 I, ...]``, gate then up, as blocks of 16 gate and 16 up rows, padded with zeros to whole blocks."""
    halves = gate_up.unflatten(0, (2, -1))
    padding = halves.new_zeros(2, -halves.shape[1] % 16, *halves.shape[2:])
    blocks = torch.cat((halves, padding), 1).unflatten(1, (-1, 16))
    interleaved: Tensor = blocks.transpose(0, 1).flatten(0, 2).contiguous()
    return interleaved
