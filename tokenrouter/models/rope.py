"""RoPE tables. The frequencies of each variant come from transformers, which defines them for the checkpoints.

N positions, D head size.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tokenrouter.kernels.rope_store_kv.reference import signed_sin


def tables(
    hf_config: Any, *, head_dim: int, max_len: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine tables ``[N, D]`` for positions 0 .. max_len - 1, computed in float32."""
    parameters = hf_config.rope_parameters or {}
    rope_type = parameters.get("rope_type", "default")
    if rope_type in ("default", "dynamic"):
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inv_freq, scaling = 1.0 / (parameters.get("rope_theta", 10_000.0) ** exponent), 1.0
    else:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](hf_config, torch.device("cpu"))
    angle_ND = torch.outer(torch.arange(max_len).float(), inv_freq.float()).repeat(1, 2)
    cos_ND, sin_ND = angle_ND.cos() * scaling, angle_ND.sin() * scaling
    return cos_ND.to(dtype), signed_sin(sin_ND).to(dtype)
