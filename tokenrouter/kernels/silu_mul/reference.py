"""The gated activation of Llama-style MLPs: ``silu(gate) * up`` (SwiGLU, Shazeer 2020, arXiv:2002.05202)."""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up_TJ: Tensor) -> Tensor:
    """Splits ``[T, 2 I]`` into gate and up halves and returns ``silu(gate) * up`` as a new ``[T, I]`` tensor."""
    gate_TI, up_TI = gate_up_TJ.chunk(2, dim=-1)
    return F.silu(gate_TI).mul_(up_TI)
