"""The gated activation of Llama-style MLPs: ``silu(gate) * up`` (SwiGLU, Shazeer 2020, arXiv:2002.05202)."""

import torch.nn.functional as F
from torch import Tensor

from tokenrouter.kernels.checks import check_gate_up


def silu_mul(gate_up_TJ: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Splits ``[T, 2 I]`` into gate and up halves: ``silu(gate) * up``, ``[T, I]``, into ``out`` or a new tensor.

    Raises:
        ValueError: not two dimensions, or an odd number of features.
    """
    check_gate_up(gate_up_TJ)
    gate_TI, up_TI = gate_up_TJ.chunk(2, dim=-1)
    product_TI = F.silu(gate_TI).mul_(up_TI)
    return product_TI if out is None else out.copy_(product_TI)
