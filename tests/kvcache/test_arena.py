"""Guards the arena: the null slot lies behind the last slot and is zero; bytes per slot are all layers'."""

import torch

from tokenrouter.kvcache import KVArena


def test_null_slot_and_sizes() -> None:
    """Padding that points at a real slot, or at memory that was never cleared."""
    arena = KVArena(num_layers=3, num_slots=10, kv_planes=4, head_dim=8, dtype=torch.bfloat16)
    assert arena.null_slot == 10 and arena.kv_LSPD.shape == (3, 11, 4, 8)
    assert not arena.kv_LSPD[:, arena.null_slot].any()
    assert arena.bytes_per_slot == 3 * 4 * 8 * 2
    other = KVArena(num_layers=2, num_slots=1, kv_planes=2, head_dim=4, dtype=torch.float32)
    assert other.bytes_per_slot == 2 * 2 * 4 * 4
