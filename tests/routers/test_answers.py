"""A bounded store of answers: what it finds is right, whatever it lost."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenrouter.routers import answers
from tokenrouter.routers.answers import AnswerCache, IntArray, hash_rows
from tokenrouter.types import RoutingDecision

CPU = torch.device("cpu")


def value_of(key_TC: IntArray) -> torch.Tensor:
    return torch.from_numpy((key_TC * np.array([31, 7])).sum(1))


class Asker:
    """Answers by the key, and counts how many keys it was asked about."""

    def __init__(self, key_TC: IntArray) -> None:
        self.key_TC, self.num_asked = key_TC, 0

    def __call__(self, index_M: torch.Tensor) -> RoutingDecision:
        value_M = value_of(self.key_TC[index_M.numpy()])
        self.num_asked += len(value_M)
        return RoutingDecision(
            route_T=value_M % 2,
            score_T=value_M.float(),
            reason_T=value_M % 3,
            reasons=("a", "b", "c"),
        )


def ask(cache: AnswerCache, key_TC: IntArray) -> tuple[int, int]:
    """Asserts that every answer is its key's; returns how many were spared, and how many asked for."""
    asker = Asker(key_TC)
    decision, num_spared = cache.answer(key_TC, asker, CPU)
    value_T = value_of(key_TC)
    assert torch.equal(decision.route_T, value_T % 2)
    assert torch.equal(decision.score_T, value_T.float())
    assert torch.equal(decision.reason_T, value_T % 3)
    return num_spared, asker.num_asked


def keys(*numbers: int) -> IntArray:
    return np.array([[number, number // 3] for number in numbers], np.int64).reshape(-1, 2)


@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(st.lists(st.integers(0, 60), max_size=40), max_size=12),
    capacity=st.sampled_from([8, 16, 40, 4096]),
)
def test_every_answer_is_the_keys_own(calls: list[list[int]], capacity: int) -> None:
    """Guards against an entry that is overwritten in half, or found under another key."""
    cache = AnswerCache(capacity)
    known: set[int] = set()
    for numbers in calls:
        num_spared, num_asked = ask(cache, keys(*numbers))
        assert len(cache) <= capacity
        assert num_spared == len(numbers) - num_asked
        assert num_asked <= len(set(numbers))
        if capacity == 4096:
            assert num_asked == len(set(numbers) - known)
        known |= set(numbers)
    if capacity == 4096 and known:
        assert ask(cache, keys(*known)) == (len(known), 0), "there was room for all"


def test_two_keys_of_one_hash_are_two_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an answer that goes by the hash alone."""
    monkeypatch.setattr(answers, "hash_rows", lambda key_TC: np.ones(len(key_TC), np.int64))
    cache = AnswerCache(8)
    for _ in range(3):
        ask(cache, keys(1, 2, 3, 1))
    ask(cache, keys(3, 3))


def test_the_least_recently_used_goes_first() -> None:
    """Guards against a cache that drops what is in constant use."""
    cache = AnswerCache(8)  # one set
    ask(cache, keys(*range(8)))
    for number in range(8, 40):
        assert ask(cache, keys(0))[0] == 1
        ask(cache, keys(number))
    assert ask(cache, keys(0, 39, 38))[0] == 3
    assert ask(cache, keys(1))[0] == 0
    assert len(cache) == 8


def test_more_keys_than_a_set_has_room_for() -> None:
    """Guards against two new keys written to one entry, each with a half of the other."""
    cache = AnswerCache(8)
    assert ask(cache, keys(*range(100))) == (0, 100)
    assert len(cache) == 8
    assert ask(cache, keys(*range(100)))[0] == 8


def test_hashes_differ_by_column_and_order() -> None:
    """Guards against rows that hash alike because their columns were summed."""
    rows = np.array([[0, 0], [0, 1], [1, 0], [1, 1], [-1, 0], [0, -1], [2, -1]], np.int64)
    assert len(set(hash_rows(rows).tolist())) == len(rows)
    many = np.stack([np.arange(100_000), np.zeros(100_000)], 1).astype(np.int64)
    hash_T = hash_rows(many)
    assert len(np.unique(hash_T)) == len(many)
    sets = np.bincount(hash_T.view(np.uint64) % np.uint64(64), minlength=64)
    assert sets.min() > 0.8 * sets.mean() and sets.max() < 1.2 * sets.mean()


def test_too_small_a_capacity_is_refused() -> None:
    """Guards against a division by no sets."""
    with pytest.raises(ValueError, match="capacity=7 must be at least 8"):
        AnswerCache(7)
