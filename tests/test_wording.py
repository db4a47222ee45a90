"""Guards the words of reports: one requests, and none request."""

import pytest

from tokenrouter.wording import counted, plural


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 requests"), (1, "1 request"), (2, "2 requests"), (1200.0, "1,200 requests")],
)
def test_a_noun_follows_its_number(number: float, words: str) -> None:
    assert counted(number, "request") == words
    assert plural(number, "request") == words.split()[1]
