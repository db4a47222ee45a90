"""Guards the host tier: what comes back is what went, bit for bit, whatever moved in between.

L layers, N entries of a request.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenrouter.kernels import Int8Entries
from tokenrouter.kvcache import HostTier, KVArena, KVPool
from tokenrouter.kvcache import host as host_module
from tokenrouter.kvcache.host import SwapCost, SwapCounts, measure_swap

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


class Clock:
    """Stands still but where it is told that something took time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.mark.parametrize("form", ["full", "int8", "converted"])
def test_the_choice_knows_what_a_gather_and_a_scatter_cost(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """One clone of contiguous bytes was timed, and neither the gather nor what each layer costs by itself."""
    _, arena = parts(form)
    clock, read, write = Clock(), KVArena.read, KVArena.write

    def slow_read(self: KVArena, layer: int, slots_N: torch.Tensor):  # type: ignore[no-untyped-def]
        clock.now_s += 5.0 + 2.0 * len(slots_N)
        return read(self, layer, slots_N)

    def slow_write(
        self: KVArena,
        layer: int,
        slots_N: torch.Tensor,
        is_int8_N: torch.Tensor,
        full: torch.Tensor,
        int8: Int8Entries,
    ) -> None:
        clock.now_s += 1.0 + 3.0 * len(slots_N)
        write(self, layer, slots_N, is_int8_N, full, int8)

    monkeypatch.setattr(host_module, "time", clock)
    monkeypatch.setattr(KVArena, "read", slow_read)
    monkeypatch.setattr(KVArena, "write", slow_write)
    cost = measure_swap(arena)
    assert cost.fixed_s == pytest.approx(3 * 6.0) and cost.entry_s == pytest.approx(3 * 5.0)
    assert cost.seconds(100) == pytest.approx(3 * (6.0 + 100 * 5.0))


@pytest.mark.parametrize("form", ["full", "int8", "converted"])
def test_timing_writes_to_no_slot_of_the_arena(form: str) -> None:
    """A copy timed on slots that hold entries, or on free ones, whose pages it would touch."""
    pool, arena = parts(form)
    fill(arena)
    tensors = [arena.kv_LSPD, *(part for entries in arena.int8 or () for part in entries)]
    before = [tensor.clone() for tensor in tensors]
    HostTier(pool, arena, GROUPS, NUM_SLOTS)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize(("recompute_s", "copies"), [(1.99, False), (2.01, True)])
def test_entries_count_by_the_layers_that_have_them(recompute_s: float, copies: bool) -> None:
    """The group with most entries stood for all layers, so that a request with few elsewhere was computed again."""
    pool, arena = parts("full")
    row = pool.acquire_row(20)
    pool.extend(row, 20)
    pool.evict(row, 0, np.arange(20) < 5)  # of layers 0 and 2; layer 1 keeps 20: a mean of 10
    host = HostTier(pool, arena, GROUPS, NUM_SLOTS, recompute_s=recompute_s)
    host._cost = SwapCost(fixed_s=10.0, entry_s=3.0)
    assert (host.swap_out(row, 20) is not None) is copies


def test_what_it_did_is_counted() -> None:
    """Counters that miss a direction, count refusals, or keep the peak of the pass before."""
    pool, arena = parts("full")
    host = HostTier(pool, arena, GROUPS, 30)
    rows = [pool.acquire_row(20) for _ in range(3)]
    for row in rows:
        pool.extend(row, 12)
    first, second = host.swap_out(rows[0], 12), host.swap_out(rows[1], 12)
    assert first is not None and second is not None
    assert host.swap_out(rows[2], 12) is None
    assert host.counts == SwapCounts(2, 0, host.counts.copy_s, 24, 24 * arena.bytes_per_slot)
    out_s = host.counts.copy_s
    host.swap_in(first, pool.acquire_row(20))
    host.drop(second)
    assert out_s > 0.0 and host.counts.copy_s > out_s
    assert (host.counts.num_in, host.peak_live, host.live) == (1, 24, 0)
    host.counts.reset()
    assert host.counts == SwapCounts()
    assert host.swap_out(rows[2], 12) is not None
    assert (host.peak_live, host.counts.peak_bytes) == (12, 12 * arena.bytes_per_slot)


def test_bytes_of_both_forms_are_counted() -> None:
    """Scales left out, or an int8 entry counted as a full one."""
    pool, arena = parts("converted")
    row = pool.acquire_row(20)
    pool.extend(row, 10)
    for group, table in enumerate(pool.tables):
        moves = table.convert(row, np.arange(10) < 4)
        for layer, of in enumerate(GROUPS):
            if of == group:
                arena.to_int8(layer, moves)
    host = HostTier(pool, arena, GROUPS, NUM_SLOTS)
    swapped = host.swap_out(row, 10)
    assert swapped is not None
    assert swapped.num_bytes == 6 * arena.bytes_per_slot + 4 * arena.int8_bytes_per_slot
