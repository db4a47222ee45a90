"""Tokens of running requests lie in the pool's rows: nothing is lost on the way in and out, nothing stays behind."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenrouter import SamplingParams
from tokenrouter.features import TokenHistory
from tokenrouter.scheduler import UNDECIDED, Request, TokenRows

MAX_LEN = 24
IS_SPECIAL_V = np.array([False, True, False, False, False])


def request(ids: list[int], max_total: int) -> Request:
    return Request(
        request_id="x",
        params=SamplingParams(),
        history=TokenHistory(ids, max_total, IS_SPECIAL_V),
        prompt_len=len(ids),
        max_total=max_total,
        arrival_s=0.0,
    )


def assert_knows(one: Request, ids: list[int], routes: list[int]) -> None:
    expected = TokenHistory(ids, len(ids), IS_SPECIAL_V)
    n = len(ids)
    assert len(one.history) == n
    for name in ("ids", "repeats", "turn_start", "prefix_hash"):
        assert (getattr(one.history, name)[:n] == getattr(expected, name)).all(), name
    assert one.requested_N[: len(routes)].tolist() == routes
    assert (one.requested_N[len(routes) :] == UNDECIDED).all(), "decisions of another request"


@given(data=st.data())
def test_tokens_and_decisions_survive_rows(data: st.DataObject) -> None:
    """Guards against decisions lost in a preemption, and against those that a row's former owner left."""
    rows = TokenRows(2, MAX_LEN)
    known: list[tuple[Request, list[int], list[int]]] = []
    for _ in range(3):
        ids = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=10))
        known.append((request(list(ids), data.draw(st.integers(len(ids), MAX_LEN))), ids, []))
    for _ in range(data.draw(st.integers(1, 20))):
        one, ids, routes = data.draw(st.sampled_from(known))
        taken = {other.row for other, _, _ in known}
        free = [row for row in (0, 1) if row not in taken]
        action = data.draw(st.sampled_from(["row", "token", "decide"]))
        if action == "row" and one.row >= 0:
            rows.leave(one)
        elif action == "row" and free:
            rows.enter(one, free[0])
        elif action == "token" and len(ids) < one.max_total:
            ids.append(data.draw(st.integers(0, 4)))
            one.history.append(ids[-1])
        elif action == "decide" and one.row >= 0 and len(routes) < len(ids):
            routes.append(data.draw(st.integers(0, 3)))
            rows.requested_RN[one.row, len(routes) - 1] = routes[-1]
        for other in known:
            assert_knows(*other)


def test_what_a_request_keeps_is_its_own() -> None:
    """Guards against a request that has ended and shows the tokens of the next one in its row."""
    rows = TokenRows(1, MAX_LEN)
    first, second = request([1, 2, 3], 8), request([4, 4, 4, 4], 8)
    rows.enter(first, 0)
    first.requested_N[:3] = 1
    rows.leave(first)
    rows.enter(second, 0)
    assert_knows(first, [1, 2, 3], [1, 1, 1])
    assert first.row == -1 and np.shares_memory(second.history.ids, rows.history.ids_RN)
