"""Guards prefix sharing between rows: what is found is what was computed, and nobody's end or eviction touches it."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenrouter.features import TokenHistory
from tokenrouter.kvcache import KVPool, PrefixCache, Stretch

NUM_SLOTS, MAX_ROWS, MAX_LEN, BLOCK = 40, 4, 24, 4
FREED = -1


class Row:
    """A request: its ids, and per group the positions that it still has."""

    def __init__(self, ids: list[int]) -> None:
        self.history = TokenHistory(ids, len(ids))
        self.seen = 0
        self.shared = 0
        self.has_evicted = False


class PrefixMachine(RuleBasedStateMachine):
    """Every slot remembers the prefix hash of the token that was written to it; a row must read its own."""

    num_groups = 2

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(
            num_slots=NUM_SLOTS, max_rows=MAX_ROWS, max_len=MAX_LEN, num_groups=self.num_groups
        )
        self.cache = PrefixCache(self.pool, BLOCK)
        self.content_GS = np.full((self.num_groups, NUM_SLOTS + 1), FREED, np.int64)
        self.rows: dict[int, Row] = {}

    @precondition(lambda self: len(self.rows) < MAX_ROWS)
    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_LEN), key=st.integers(0, 1))
    def start(self, ids: list[int], key: int) -> None:
        new = Row([key, *ids][:MAX_LEN])
        number = self.pool.acquire_row(len(ids))
        self.rows[number] = new
        most = len(new.history) - 1
        prefix = self.cache.find("key", new.history.ids, new.history.prefix_hash, most)
        if prefix is not None:
            assert 0 < prefix.num_tokens <= most and prefix.num_tokens % BLOCK == 0
            self.pool.adopt(number, prefix)
            new.seen = new.shared = prefix.num_tokens

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(1, 9))
    def extend(self, data: st.DataObject, count: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.rows)))
        row = self.rows[number]
        length = min(row.seen + count, len(row.history))
        wanted, used = length - row.seen, self.pool.used
        assert self.pool.extend(number, length) == (wanted <= NUM_SLOTS - used)
        if wanted <= NUM_SLOTS - used:
            for group, table in enumerate(self.pool.tables):
                slots = (
                    table.slots_RN[number, : table.num_kept_R[number]][-wanted:] if wanted else []
                )
                self.content_GS[group, slots] = row.history.prefix_hash[row.seen : length]
            row.seen = length

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.rows)))
        row = self.rows[number]
        stop = row.seen // BLOCK * BLOCK
        if row.has_evicted or stop <= row.shared:
            return
        tables = self.pool.tables
        stretch = Stretch(
            ids_N=row.history.ids[:stop].copy(),
            slots_GK=tuple(t.slots_RN[number, :stop].copy() for t in tables),
            positions_GK=tuple(t.positions_RN[number, :stop].copy() for t in tables),
            requested_N=np.zeros(stop, np.int16),
        )
        lengths = range(row.shared + BLOCK, stop + 1, BLOCK)
        self.cache.insert("key", stretch, row.history.prefix_hash, lengths)
        row.shared = stop

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), group=st.integers(0, num_groups - 1))
    def evict(self, data: st.DataObject, group: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.rows)))
        kept = int(self.pool.tables[group].num_kept_R[number])
        stays = data.draw(st.lists(st.booleans(), min_size=kept, max_size=kept))
        assert self.pool.evict(number, group, np.array(stays, np.bool_)) == stays.count(False)
        self.rows[number].has_evicted |= not all(stays)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.rows)))
        self.pool.release(number)
        del self.rows[number]

    @rule(num_slots=st.integers(0, NUM_SLOTS))
    def make_free(self, num_slots: int) -> None:
        assert self.pool.make_free(num_slots) == (num_slots <= self.pool.available)

    @rule()
    def compact(self) -> None:
        for group, table in enumerate(self.pool.tables):
            moves = table.close_ranks()
            self.cache.renumber(group, moves)
            content_S = self.content_GS[group]
            content_S[moves.after_N] = content_S[moves.before_N]
            assert table.slots.num_touched == len(moves.after_N)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert len(self.cache) == 0 and self.pool.cached == 0

    @invariant()
    def every_row_reads_its_own_tokens(self) -> None:
        for number, row in self.rows.items():
            for group, table in enumerate(self.pool.tables):
                kept = int(table.num_kept_R[number])
                positions_N = table.positions_RN[number, :kept]
                found_N = self.content_GS[group, table.slots_RN[number, :kept]]
                assert (found_N == row.history.prefix_hash[positions_N]).all()

    @invariant()
    def counts_agree(self) -> None:
        pool = self.pool
        pool.check_integrity()
        for group, table in enumerate(pool.tables):
            in_use = {
                int(s)
                for number in self.rows
                for s in table.slots_RN[number, : table.num_kept_R[number]]
            }
            held = {int(s) for slots in self.cache.held(group) for s in slots}
            slots = table.slots
            assert (slots.used, slots.cached, slots.idle) == (
                len(in_use),
                len(held),
                len(held - in_use),
            )
            assert slots.free == NUM_SLOTS - len(in_use | held)
            unused = sorted(set(range(NUM_SLOTS)) - in_use - held)
            self.content_GS[group, unused] = FREED
        assert pool.free + pool.live + pool.cached == NUM_SLOTS


TestPrefixes = PrefixMachine.TestCase
TestPrefixes.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)


def computed(pool: KVPool, ids: list[int]) -> tuple[int, TokenHistory, Stretch]:
    """A row with all of ``ids``, and what it could leave."""
    history = TokenHistory(ids, len(ids))
    row = pool.acquire_row(len(ids))
    assert pool.extend(row, len(ids))
    table = pool.tables[0]
    stretch = Stretch(
        ids_N=history.ids.copy(),
        slots_GK=(table.slots_RN[row, : len(ids)].copy(),),
        positions_GK=(table.positions_RN[row, : len(ids)].copy(),),
        requested_N=np.zeros(len(ids), np.int16),
    )
    return row, history, stretch


def test_the_longest_prefix_under_the_same_key_is_found() -> None:
    """A hit under another router's key, behind the limit, between blocks, or at an older, shorter prefix."""
    pool = KVPool(num_slots=64, max_rows=2, max_len=32)
    cache = PrefixCache(pool, 4)
    ids = list(range(20))
    _, history, stretch = computed(pool, ids)
    cache.insert("a", stretch, history.prefix_hash, range(4, 21, 4))
    for most, expected in ((20, 20), (19, 16), (15, 12), (4, 4)):
        found = cache.find("a", history.ids, history.prefix_hash, most)
        assert found is not None and found.num_tokens == expected == len(found.slots(0))
    assert cache.find("a", history.ids, history.prefix_hash, 3) is None
    assert cache.find("b", history.ids, history.prefix_hash, 20) is None
    changed = TokenHistory([*ids[:9], 99, *ids[10:]], 20)
    found = cache.find("a", changed.ids, changed.prefix_hash, 20)
    assert found is not None and found.num_tokens == 8


def test_equal_hashes_of_different_ids_are_told_apart() -> None:
    """A collision that hands one request another's text."""
    pool = KVPool(num_slots=64, max_rows=2, max_len=32)
    cache = PrefixCache(pool, 4)
    _, history, stretch = computed(pool, [1, 2, 3, 4])
    cache.insert("a", stretch, history.prefix_hash, [4])
    other = np.array([1, 2, 3, 5])
    assert cache.find("a", other, history.prefix_hash, 4) is None


def test_the_end_of_the_oldest_prompt_goes_first() -> None:
    """Beginnings dropped before the ends that hang on them: slots stay taken, and no prompt finds anything."""
    pool = KVPool(num_slots=24, max_rows=3, max_len=24)
    cache = PrefixCache(pool, 4)
    histories = []
    for first in (100, 200):
        row, history, stretch = computed(pool, list(range(first, first + 12)))
        cache.insert("a", stretch, history.prefix_hash, range(4, 13, 4))
        pool.release(row)
        histories.append(history)
    old, new = histories
    assert (pool.free, pool.cached, pool.used) == (0, 24, 0)
    assert pool.make_free(2) and pool.free == 4
    for history, expected in ((old, 8), (new, 12)):
        found = cache.find("a", history.ids, history.prefix_hash, 12)
        assert found is not None and found.num_tokens == expected
    assert pool.make_free(7) and pool.free == 8
    found = cache.find("a", old.ids, old.prefix_hash, 12)  # it was used before the new one
    assert found is not None and found.num_tokens == 4
    found = cache.find("a", new.ids, new.prefix_hash, 12)
    assert found is not None and found.num_tokens == 12


def test_slots_in_use_are_never_given_up() -> None:
    """Room that is promised from entries which a request still reads."""
    pool = KVPool(num_slots=16, max_rows=3, max_len=16)
    cache = PrefixCache(pool, 4)
    row, history, stretch = computed(pool, list(range(12)))
    cache.insert("a", stretch, history.prefix_hash, range(4, 13, 4))
    assert pool.available == 4 and not pool.make_free(5) and len(cache) == 3
    other = pool.acquire_row(16)
    assert not pool.extend(other, 5) and pool.extend(other, 4)
    pool.release(row)
    assert pool.available == 12 and pool.extend(other, 16) and len(cache) == 0
    pool.check_integrity()


@pytest.mark.parametrize("block", [0, -1])
def test_a_block_without_tokens_is_refused(block: int) -> None:
    """A search that never ends."""
    with pytest.raises(ValueError, match=f"block_tokens must be at least 1, got {block}"):
        PrefixCache(KVPool(num_slots=1, max_rows=1, max_len=1), block)


def test_rows_go_on_in_runs_where_the_pool_is_full_of_prefixes() -> None:
    """Slots given up one by one, or a whole run for the first row that asks: every token then searches the pool."""
    pool = KVPool(num_slots=1024, max_rows=4, max_len=256)
    cache = PrefixCache(pool, 8)
    for first in range(0, 5000, 1000):
        row, history, stretch = computed(pool, list(range(first, first + 200)))
        cache.insert("a", stretch, history.prefix_hash, range(8, 201, 8))
        pool.release(row)
    rows = [pool.acquire_row(8) for _ in range(4)]
    for length in range(1, 129):
        assert all(pool.extend(row, length) for row in rows)
    breaks = [int((np.diff(pool.tables[0].slots_RN[row, :128]) != 1).sum()) for row in rows]
    assert max(breaks) <= 24 and sum(breaks) <= 80
    pool.check_integrity()


def test_rows_that_adopt_a_prefix_lie_side_by_side() -> None:
    """Each got a second run of 256 slots beside the one that it was promised: 39 short prompts lay over 11,000 slots,
    whose pages of every layer were touched for the first time."""
    pool = KVPool(num_slots=40_000, max_rows=64, max_len=512)
    cache = PrefixCache(pool, 8)
    first, history, stretch = computed(pool, list(range(32)))
    cache.insert("a", stretch, history.prefix_hash, range(8, 33, 8))
    pool.release(first)
    table = pool.tables[0]
    shared_N, positions_N = stretch.slots_GK[0], stretch.positions_GK[0]
    for _ in range(40):
        row = pool.acquire_row(40)
        table.adopt(row, shared_N, positions_N, 32)
        assert pool.extend(row, 40)
        assert (np.diff(table.slots_RN[row, 32:40]) == 1).all()
    assert int(np.flatnonzero(table.slots._touched_S).max()) < 41 * 40
    pool.check_integrity()
