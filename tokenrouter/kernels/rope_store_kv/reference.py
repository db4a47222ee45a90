"""Rotary position embedding of q and k, and the write of k and v to their slots.

T tokens, O = (H + 2 G) D, H query heads, G key heads, D head size, S slots, P = 2 G (key heads, then value heads).
Rotation: Su et al. 2021 (arXiv:2104.09864), in the half-split form of the Llama checkpoints.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tokenrouter.kernels.checks import num_query_heads
from tokenrouter.kernels.quantize_rows.reference import quantize_rows
from tokenrouter.kernels.values import Int8Entries, QuantizedRows


def rope_store_kv(
    qkv_TO: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    slots_T: Tensor,
    kv_SPD: Tensor,
    *,
    int8: Int8Entries | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rotates query and key heads, and writes keys and values to ``kv_SPD[slots_T]``.

    Args:
        qkv_TO: query heads, key heads, value heads side by side; not modified.
        cos_TD: cosines, the half repeated, in ``qkv``'s dtype.
        sin_TD: sines with the first half negated (``rotate_half``'s sign), in ``qkv``'s dtype.
        slots_T: int64, distinct.
        kv_SPD: one layer of the arena. Rows ``slots_T`` are overwritten; no other row is touched.
        int8: entries of the slots from ``len(kv_SPD)`` on, quantised with a scale per plane. Where it is given, queries
            and all keys are ``spread``.
        out: where the rotated queries go.

    Returns:
        The rotated queries, ``[T, H, D]``.

    Raises:
        ValueError: ``qkv`` is not whole heads of the arena's size.
    """
    num_kv_heads, head_dim = kv_SPD.shape[1] // 2, kv_SPD.shape[2]
    num_rotated = num_query_heads(qkv_TO, kv_SPD) + num_kv_heads
    heads_THD = qkv_TO.unflatten(1, (num_rotated + num_kv_heads, head_dim))
    plain_THD, value_TGD = heads_THD.split_with_sizes((num_rotated, num_kv_heads), 1)
    rotated_THD = torch.addcmul(
        plain_THD * cos_TD.unsqueeze(1), plain_THD.roll(head_dim // 2, -1), sin_TD.unsqueeze(1)
    )
    if int8 is not None:
        rotated_THD = spread(rotated_THD)
    q_THD, key_TGD = rotated_THD.split_with_sizes((num_rotated - num_kv_heads, num_kv_heads), 1)
    entry_TPD = torch.cat((key_TGD, value_TGD), 1)
    if int8 is None:
        kv_SPD.index_copy_(0, slots_T, entry_TPD)
    else:
        is_full_T = slots_T < len(kv_SPD)
        kv_SPD.index_copy_(0, slots_T[is_full_T], entry_TPD[is_full_T])
        store_int8(entry_TPD[~is_full_T], slots_T[~is_full_T] - len(kv_SPD), int8)
    return q_THD if out is None else out.copy_(q_THD)


def spread(x: Tensor) -> Tensor:
    """The last dimension times an orthonormal Hadamard matrix, in blocks of the largest power of two that divides it.

    Outlying channels of keys are spread over all, so that one scale per key fits; scores of queries and keys that both
    went through it are what they were (QuaRot, Ashkboos et al. 2024, arXiv:2404.00456). Added up in float32.
    """
    head_dim = x.shape[-1]
    block, half, y = head_dim & -head_dim, 1, x.float()
    while half < block:
        a, b = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
        half *= 2
    scale = torch.tensor(1.0) / torch.tensor(float(block)).sqrt()
    return (y * scale).to(x.dtype)


def store_int8(
    entry_TPD: Tensor,
    slots_T: Tensor,
    int8: Int8Entries,
    quantize: Callable[[Tensor], QuantizedRows] = quantize_rows,
) -> None:
    """Quantises entries, by a backend's ``quantize_rows``, and writes them to rows ``slots_T`` (int64) of ``int8``."""
    rows = quantize(entry_TPD.flatten(0, 1))
    int8.q_SPD.index_copy_(0, slots_T, rows.q_TK.view_as(entry_TPD))
    int8.scale_SP.index_copy_(0, slots_T, rows.scale_T1.float().view(entry_TPD.shape[:2]))


def signed_sin(sin_ND: Tensor) -> Tensor:
    """The sine table with its first half negated, as ``rope_store_kv`` takes it."""
    half = sin_ND.shape[-1] // 2
    return torch.cat((-sin_ND[..., :half], sin_ND[..., half:]), dim=-1)
