"""Guards giving memory back: nothing that is kept changes, and the process really becomes smaller.

L layers, S slots, P planes, D head size.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenrouter.kvcache import Compactor, KVArena, KVPool
from tokenrouter.kvcache.compaction import PATIENCE_STEPS


def resident_bytes() -> int:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def write(pool: KVPool, arena: KVArena, groups: tuple[int, ...], row: int) -> None:
    """To every entry of a row what says which it is: row and original position, in each layer."""
    for layer, group in enumerate(groups):
        table = pool.tables[group]
        kept = table.num_kept_R[row]
        slots_N = torch.from_numpy(table.slots_RN[row, :kept].copy())
        value_N = torch.from_numpy(1000.0 * (row + 1) + table.positions_RN[row, :kept] + layer / 4)
        arena.layers[layer][slots_N] = value_N[:, None, None].to(arena.kv_LSPD.dtype)


def check(pool: KVPool, arena: KVArena, groups: tuple[int, ...], rows: list[int]) -> None:
    """Every entry still says what it is."""
    pool.check_integrity()
    for row in rows:
        for layer, group in enumerate(groups):
            table = pool.tables[group]
            kept = table.num_kept_R[row]
            found_NPD = arena.layers[layer][torch.from_numpy(table.slots_RN[row, :kept].copy())]
            value_N = 1000.0 * (row + 1) + table.positions_RN[row, :kept] + layer / 4
            assert (found_NPD.double().numpy() == value_N[:, None, None]).all()
    assert not arena.kv_LSPD[:, -1].any(), "the null slot"


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_groups=st.integers(1, 2))
def test_entries_keep_what_they_hold(data: st.DataObject, num_groups: int) -> None:
    """Rows that overlap while they move, an entry moved in the layers of another group, touched slots miscounted."""
    groups = (0, num_groups - 1, 0)
    pool = KVPool(num_slots=60, max_rows=4, max_len=40, num_groups=num_groups)
    arena = KVArena(num_layers=3, num_slots=60, kv_planes=2, head_dim=2, dtype=torch.float32)
    rows: list[int] = []
    for _ in range(data.draw(st.integers(1, 8))):
        action = data.draw(st.sampled_from(["admit", "evict", "release", "grow", "compact"]))
        if action == "admit" and pool.num_free_rows:
            row = pool.acquire_row(data.draw(st.integers(1, 40)))
            rows.append(row)
            pool.extend(row, data.draw(st.integers(1, 20)))
            write(pool, arena, groups, row)
        elif action == "release" and rows:
            pool.release(rows.pop())
        elif action == "grow" and rows:
            row = data.draw(st.sampled_from(rows))
            pool.extend(row, int(pool.tables[0].num_seen_R[row]) + 1)
            write(pool, arena, groups, row)
        elif action == "evict" and rows:
            row, group = data.draw(st.sampled_from(rows)), data.draw(st.integers(0, num_groups - 1))
            kept = int(pool.tables[group].num_kept_R[row])
            stays = data.draw(st.lists(st.booleans(), min_size=kept, max_size=kept))
            pool.evict(row, group, np.array(stays, bool))
        elif action == "compact":
            Compactor(pool, arena, groups).compact()
            assert all(table.slots.num_touched == table.slots.used for table in pool.tables)
        check(pool, arena, groups, rows)


def test_the_process_becomes_smaller() -> None:
    """Slots that are free while their pages stay: what eviction is for, not done."""
    groups = (0,) * 8
    pool = KVPool(num_slots=40_000, max_rows=4, max_len=10_000)
    arena = KVArena(num_layers=8, num_slots=40_000, kv_planes=6, head_dim=64, dtype=torch.bfloat16)
    before = resident_bytes()
    rows = [pool.acquire_row(10_000) for _ in range(4)]
    for row in rows:
        pool.extend(row, 10_000)
    arena.kv_LSPD[:, :-1].fill_(1)
    total = 40_000 * arena.bytes_per_slot
    full = resident_bytes()
    assert full - before > 0.9 * total
    compactor = Compactor(pool, arena, groups)
    assert not compactor.is_due
    for row in rows:
        pool.evict(row, 0, np.arange(10_000) % 10 == 0)
    assert pool.num_touched == 40_000 and compactor.is_due
    evicted = resident_bytes()
    given_back = compactor.compact()
    assert given_back == 36_000 and pool.num_touched == pool.live == 4_000
    assert evicted - resident_bytes() > 0.8 * total
    assert bool((arena.kv_LSPD[:, :4_000] == 1).all())
    assert pool.touched_bytes(3, 2) == 12_000
    assert not compactor.is_due


def test_memory_that_is_soon_needed_again_stays() -> None:
    """Entries moved and pages given back at every lull of a load that goes up and down."""
    pool = KVPool(num_slots=4000, max_rows=2, max_len=4000)
    arena = KVArena(num_layers=1, num_slots=4000, kv_planes=2, head_dim=2, dtype=torch.float32)
    compactor = Compactor(pool, arena, (0,))
    num_compactions = 0
    for _ in range(5):
        row = pool.acquire_row(3000)
        pool.extend(row, 3000)
        num_compactions += compactor.compact_if_due()
        pool.release(row)
        num_compactions += sum(compactor.compact_if_due() for _ in range(PATIENCE_STEPS))
    assert num_compactions == 0 and pool.num_touched == 3000
    assert compactor.compact_if_due() and pool.num_touched == 0
    assert not any(compactor.compact_if_due() for _ in range(2 * PATIENCE_STEPS))


@pytest.mark.parametrize(("num_slots", "is_due"), [(900, False), (3000, True)])
def test_a_move_must_be_worth_it(num_slots: int, is_due: bool) -> None:
    """A copy of everything for a page, at every step."""
    pool = KVPool(num_slots=4000, max_rows=2, max_len=4000)
    first, second = pool.acquire_row(2000), pool.acquire_row(2000)
    pool.extend(first, num_slots)
    pool.extend(second, 100)
    pool.release(first)
    arena = KVArena(num_layers=1, num_slots=4000, kv_planes=2, head_dim=2, dtype=torch.float32)
    assert Compactor(pool, arena, (0,)).is_due is is_due
