"""Guards the host tier: what comes back is what went, bit for bit, whatever moved in between.

L layers, N entries of a request.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenrouter.kvcache import HostTier, KVArena, KVPool

NUM_SLOTS, GROUPS = 60, (0, 1, 0)


def parts(form: str) -> tuple[KVPool, KVArena]:
    """A pool of two layer groups: full entries, int8 ones, or full ones that may be converted."""
    is_int8 = form == "int8"
    num_converted = NUM_SLOTS if form == "converted" else 0
    pool = KVPool(
        num_slots=NUM_SLOTS,
        max_rows=4,
        max_len=50,
        num_groups=2,
        first_slot=int(is_int8),
        num_int8=num_converted,
    )
    arena = KVArena(
        num_layers=3,
        num_slots=0 if is_int8 else NUM_SLOTS,
        kv_planes=2,
        head_dim=4,
        dtype=torch.bfloat16,
        num_int8=NUM_SLOTS if is_int8 else num_converted,
    )
    return pool, arena


def content(pool: KVPool, arena: KVArena, row: int) -> list[tuple[torch.Tensor, ...]]:
    """What a row's entries hold, per layer."""
    found = []
    for layer, group in enumerate(GROUPS):
        table = pool.tables[group]
        slots_N = torch.from_numpy(table.slots_RN[row, : table.num_kept_R[row]].copy())
        full, int8 = arena.read(layer, slots_N)
        found.append((arena.is_int8(slots_N), full, *int8))
    return found


def fill(arena: KVArena) -> None:
    """Every entry something else."""
    arena.kv_LSPD[:, :-1] = torch.randn(arena.kv_LSPD[:, :-1].shape)
    for q_SPD, scale_SP in arena.int8 or ():
        q_SPD.copy_(torch.randint(-127, 128, q_SPD.shape))
        scale_SP.copy_(torch.rand(scale_SP.shape))


@pytest.mark.parametrize("form", ["full", "int8", "converted"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_comes_back_is_what_went(form: str, data: st.DataObject) -> None:
    """Entries in another order, layer or form, positions that count what is left, a slot kept on both sides."""
    pool, arena = parts(form)
    host = HostTier(pool, arena, GROUPS, NUM_SLOTS)
    rows = [pool.acquire_row(40) for _ in range(2)]
    for row in rows:
        pool.extend(row, data.draw(st.integers(1, 25)))
    fill(arena)
    row, other = rows
    for group, table in enumerate(pool.tables):
        if form == "converted":
            chosen_N = np.random.default_rng(1).random(table.num_kept_R[row]) < 0.5
            moves = table.convert(row, chosen_N)
            for layer, of in enumerate(GROUPS):
                if of == group:
                    arena.to_int8(layer, moves)
        kept = int(table.num_kept_R[row])
        stays = data.draw(st.lists(st.booleans(), min_size=kept, max_size=kept))
        pool.evict(row, group, np.array(stays, bool))
    seen = int(pool.tables[0].num_seen_R[row])
    before = content(pool, arena, row)
    positions = [t.positions_RN[row, : t.num_kept_R[row]].tolist() for t in pool.tables]
    swapped = host.swap_out(row, seen)
    assert swapped is not None and host.free + host.live == host.num_slots
    assert host.live == swapped.num_entries == max(map(len, positions))
    pool.check_integrity()
    pool.release(other)
    fresh = pool.acquire_row(40)
    pool.extend(fresh, data.draw(st.integers(1, 30)))  # others take the slots
    again = pool.acquire_row(40)
    host.swap_in(swapped, again)
    pool.check_integrity()
    assert host.live == 0
    assert [t.positions_RN[again, : t.num_kept_R[again]].tolist() for t in pool.tables] == positions
    assert all(int(t.num_seen_R[again]) == seen for t in pool.tables)
    for ours, theirs in zip(content(pool, arena, again), before, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    assert pool.extend(again, seen + 1)
    assert pool.tables[0].positions_RN[again, pool.tables[0].num_kept_R[again] - 1] == seen


def test_no_room_and_no_gain() -> None:
    """A tier that takes more than it may hold; a copy that costs more than the work it saves."""
    pool, arena = parts("full")
    row = pool.acquire_row(20)
    pool.extend(row, 20)
    assert HostTier(pool, arena, GROUPS, 19).swap_out(row, 20) is None
    assert HostTier(pool, arena, GROUPS, 60, recompute_s=0.0).swap_out(row, 20) is None
    assert pool.live == 20
    host = HostTier(pool, arena, GROUPS, 20)
    swapped = host.swap_out(row, 15)  # the last five are not computed yet
    assert swapped is not None and (host.live, host.free, pool.live) == (15, 5, 0)
    host.drop(swapped)
    assert host.free == 20
