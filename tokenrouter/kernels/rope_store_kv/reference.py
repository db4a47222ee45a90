"""Rotary position embedding of q and k, and the write of k and v to their slots.

T tokens, O = (H + 2 H_kv) D, D head size, S slots, P = 2 H_kv (key heads, then value heads).
Rotation: Su et al. 2021 (arXiv:2104.09864), in the half-split form of the Llama checkpoints.
"""

import torch
from torch import Tensor


def rope_store_kv(qkv_TO: Tensor, cos_TD: Tensor, sin_TD: Tensor, slots_T: Tensor, kv_SPD: Tensor) -> None:
    """Rotates the query and key heads of ``qkv_TO`` in place and copies keys and values to ``kv_SPD[slots_T]``.

    Args:
        qkv_TO: query heads, key heads, value heads side by side. Modified.
        cos_TD: cosines, the half repeated, in ``qkv``'s dtype.
        sin_TD: sines with the first half negated (``rotate_half``'s sign), in ``qkv``'s dtype.
        slots_T: int64, distinct.
        kv_SPD: one layer of the arena. Rows ``slots_T`` are overwritten; no other row is touched.
    """
    num_kv_planes, head_dim = kv_SPD.shape[1:]
    heads_THD = qkv_TO.unflatten(-1, (-1, head_dim))
    rotated_THD = heads_THD[:, : heads_THD.shape[1] - num_kv_planes // 2]
    swapped_THD = rotated_THD.roll(head_dim // 2, -1).mul_(sin_TD[:, None])
    rotated_THD.mul_(cos_TD[:, None]).add_(swapped_THD)
    kv_SPD.index_copy_(0, slots_T, heads_THD[:, -num_kv_planes:])


def signed_sin(sin_ND: Tensor) -> Tensor:
    """The sine table with its first half negated, as ``rope_store_kv`` takes it."""
    half = sin_ND.shape[-1] // 2
    return torch.cat((-sin_ND[..., :half], sin_ND[..., half:]), dim=-1)
