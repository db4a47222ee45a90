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
    """Cosine and signed sine tables for positions 0 .. max_len - 1, computed in float32.

    Args:
        hf_config: a transformers config with one of ``tokenrouter.models.config.ROPE_TYPES``.
        head_dim: D, all of which is rotated.
        max_len: N.
        dtype: of the tables.

    Returns:
        Two tables ``[N, D]`` on the CPU. The first half of each sine row is negated, as ``rope_store_kv`` takes it.

    Raises:
        ValueError: a parameter of the RoPE type is missing or unusable.
    """
    parameters = hf_config.rope_parameters or {}
    rope_type = parameters.get("rope_type", "default")
    if rope_type in ("default", "dynamic"):
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inv_freq, scaling = 1.0 / (parameters.get("rope_theta", 10_000.0) ** exponent), 1.0
    else:
        try:
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](hf_config, torch.device("cpu"))
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ValueError(
                f"rope_parameters of the type {rope_type!r} lack a parameter or hold one that cannot be used "
                f"({type(error).__name__}: {error}); they are {parameters}"
            ) from error
    angle_ND = torch.outer(torch.arange(max_len).float(), inv_freq.float()).repeat(1, 2)
    cos_ND, sin_ND = angle_ND.cos() * scaling, angle_ND.sin() * scaling
    return cos_ND.to(dtype), signed_sin(sin_ND).to(dtype)
