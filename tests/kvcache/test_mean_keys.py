"""Guards the mean keys of sparse attention: forgotten when a row's entries change, kept while they only grow."""

import numpy as np
import pytest

from tokenrouter.kvcache import KVPool, MeanKeys


def made(num_groups: int = 2) -> tuple[KVPool, MeanKeys]:
    pool = KVPool(num_slots=64, max_rows=3, max_len=32, num_groups=num_groups)
    groups = [layer % num_groups for layer in range(4)]
    return pool, MeanKeys(pool.tables, groups, block=4, num_kv_heads=2, head_dim=8)


def valid(means: MeanKeys) -> list[list[int]]:
    means.forget_changed()
    return [layer.num_valid_R.tolist() for layer in means.layers]


def test_growth_keeps_and_change_forgets() -> None:
    """Means of evicted entries, of the row's last request, or of another group's layers."""
    pool, means = made()
    rows = [pool.acquire_row(8), pool.acquire_row(8)]
    assert all(pool.extend(row, 8) for row in rows)
    valid(means)
    for layer in means.layers:
        layer.num_valid_R[rows] = 2
    assert all(pool.extend(row, 12) for row in rows)
    assert all(layer[rows[0]] == layer[rows[1]] == 2 for layer in valid(means))
    pool.tables[1].evict(rows[0], np.arange(12) % 2 == 0)
    found = valid(means)
    assert [layer[rows[0]] for layer in found] == [2, 0, 2, 0]
    assert [layer[rows[1]] for layer in found] == [2, 2, 2, 2]
    pool.release(rows[1])
    assert [layer[rows[1]] for layer in valid(means)] == [0, 0, 0, 0]


def test_sizes_that_no_system_has_are_refused_in_words() -> None:
    """An allocator's error without an option in it."""
    pool, _ = made()
    with pytest.raises(ValueError, match=r"lower scheduler\.max_num_seqs"):
        MeanKeys(pool.tables, [0] * 4, block=1, num_kv_heads=1 << 20, head_dim=1 << 30)
