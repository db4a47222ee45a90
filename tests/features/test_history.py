"""Ids, repeats and prefix hashes of one request."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenrouter.features import HistoryRows, TokenHistory, sequence_batch
from tokenrouter.telemetry.memory import process_bytes
from tokenrouter.types import Phase

IDS = st.integers(0, 12) | st.integers(0, 2**31)
SEQUENCES = st.lists(IDS, min_size=1, max_size=60)
COLUMNS = ("ids", "repeats", "turn_start", "prefix_hash")
IS_SPECIAL_V = np.array([True, False] * 7)


def assert_same(a: TokenHistory, b: TokenHistory) -> None:
    assert len(a) == len(b)
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(a, name)[: len(a)], getattr(b, name)[: len(b)], name)


@given(SEQUENCES, st.integers(1, 60))
def test_append_equals_building_from_scratch(ids: list[int], cut: int) -> None:
    """Guards against a decode path whose hashes or repeats differ from a recompute's."""
    cut = min(cut, len(ids))
    is_special_V = IS_SPECIAL_V if max(ids) < len(IS_SPECIAL_V) else None
    grown = TokenHistory(ids[:cut], len(ids), is_special_V)
    for token_id in ids[cut:]:
        grown.append(token_id)
    assert_same(grown, TokenHistory(ids, len(ids), is_special_V))


@given(SEQUENCES, SEQUENCES, SEQUENCES)
def test_a_prefix_hash_knows_nothing_of_what_follows(
    prefix: list[int], one: list[int], other: list[int]
) -> None:
    """Guards against hashes that depend on the prompt's length, so that no prefix ever matches."""
    n = len(prefix)
    a = TokenHistory(prefix + one, capacity=200)
    b = TokenHistory(prefix + other, capacity=130)
    np.testing.assert_array_equal(a.prefix_hash[:n], b.prefix_hash[:n])
    np.testing.assert_array_equal(a.repeats[:n], b.repeats[:n])


@given(SEQUENCES)
def test_repeats_count_earlier_occurrences(ids: list[int]) -> None:
    """Guards against an unstable sort, which numbers equal ids in any order."""
    history = TokenHistory(ids, capacity=len(ids))
    assert history.repeats.tolist() == [ids[:n].count(ids[n]) for n in range(len(ids))]


def test_different_prefixes_have_different_hashes() -> None:
    """Guards against hashes blind to order, length or id 0, which would tie draws together."""
    prefixes = [
        [0],
        [0, 0],
        [0, 0, 0],
        [1],
        [0, 1],
        [1, 0],
        [1, 1],
        [2, 0, 1],
        [0, 2, 1],
        [0, 1, 2],
    ]
    last = [TokenHistory(ids, capacity=3).prefix_hash[len(ids) - 1] for ids in prefixes]
    assert len(set(last)) == len(prefixes)
    many = TokenHistory([7] * 50_000, capacity=50_000).prefix_hash
    assert len(np.unique(many)) == 50_000


def test_prefix_hash_bits_are_balanced() -> None:
    """Guards against a missing finaliser: the low bits of a polynomial hash are far from random."""
    hashes = TokenHistory(np.arange(20_000) % 3, capacity=20_000).prefix_hash.view(np.uint64)
    for bit in range(64):
        ones = ((hashes >> np.uint64(bit)) & np.uint64(1)).mean()
        assert abs(ones - 0.5) < 0.02, f"bit {bit}: {ones:.3f} ones"


@pytest.mark.parametrize("ids", [[], [1] * 9, [3, -1]], ids=["empty", "too long", "negative"])
def test_bad_prompts_are_refused(ids: list[int]) -> None:
    """Guards against silent truncation, and a negative id that indexes from the end."""
    with pytest.raises(ValueError, match=r"allowed|negative"):
        TokenHistory(ids, capacity=8)


def test_appending_beyond_the_capacity_is_refused() -> None:
    """Guards against a write past the model's length."""
    history = TokenHistory([1, 2], capacity=2)
    with pytest.raises(ValueError, match="capacity is 2"):
        history.append(3)
    assert len(history) == 2


def test_sequence_batch_splits_prompt_and_decode() -> None:
    """Guards against an off-by-one at the prompt's end in calibration and label making."""
    batch = sequence_batch([5, 6, 5, 5], prompt_len=3, row=4)
    assert batch.ids_T.tolist() == [5, 6, 5, 5]
    assert batch.positions_T.tolist() == [0, 1, 2, 3]
    assert batch.repeats_T.tolist() == [0, 0, 1, 2]
    assert batch.row_T.tolist() == [4] * 4
    assert batch.prompt_len_T.tolist() == [3] * 4
    assert batch.phase_T.tolist() == [Phase.PREFILL] * 3 + [Phase.DECODE]
    assert batch.hidden_TE is None
    columns = set(batch.__slots__) - {"hidden_TE"}
    assert all(getattr(batch, name).dtype == torch.int64 for name in columns)
    assert sequence_batch([5, 6]).phase_T.tolist() == [Phase.PREFILL] * 2
    with pytest.raises(ValueError, match="outside 1 to 2"):
        sequence_batch([5, 6], prompt_len=3)


def test_turns_begin_at_special_tokens() -> None:
    """Guards against a turn that begins at the token before or behind the marker, and one made up for no table."""
    history = TokenHistory([1, 1, 0, 1], 6, IS_SPECIAL_V)
    history.append(1)
    history.append(2)
    assert history.turn_start.tolist() == [0, 0, 2, 2, 2, 5]
    assert TokenHistory([1, 0, 1], 3).turn_start.tolist() == [-1, -1, -1]


@pytest.mark.parametrize("capacity", [65_535, 65_536])
def test_counts_reach_as_far_as_a_history(capacity: int) -> None:
    """Guards against a count that wraps to 0 at the end of its two bytes."""
    history = TokenHistory([7] * (capacity - 2), capacity)
    history.append(7)
    history.append(7)
    assert history.repeats[-3:].tolist() == [capacity - 3, capacity - 2, capacity - 1]


def test_counts_take_memory_only_of_rows_that_grow() -> None:
    """Guards against a table of counts that is written in all rows when one of them meets a large id."""
    rows, histories = HistoryRows(500, 8), [TokenHistory([1, 2, 2], 8) for _ in range(2)]
    for row, history in enumerate(histories):
        history.move(rows, row)
    before_bytes = process_bytes()
    for token_id in (2, 200_000, 2, 200_000, 140_000):
        histories[1].append(token_id)
    assert process_bytes() - before_bytes < 32 << 20, "of 256 MiB"
    assert histories[1].repeats.tolist() == [0, 0, 1, 2, 0, 3, 1, 0]
    histories[0].append(2)
    assert histories[0].repeats[3] == 2
