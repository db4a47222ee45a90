"""Guards the token-level end of an output."""

from typing import Any

import pytest

from tokenrouter.engine.sampler import check_stop
from tokenrouter.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("options", "output", "room", "expected"),
    [
        ({}, [1, 9], 100, ("stop", None)),
        ({"ignore_eos": True}, [1, 9], 100, None),
        ({"ignore_eos": True, "stop_token_ids": [9]}, [1, 9], 100, ("stop", 9)),
        ({"stop_token_ids": [9]}, [1, 9], 100, ("stop", None)),
        ({"stop_token_ids": [5, 4]}, [1, 4], 100, ("stop", 4)),
        ({"stop_token_ids": [4]}, [4, 1], 100, None),
        ({"stop_token_ids": [4], "min_tokens": 3}, [1, 4], 100, None),
        ({"stop_token_ids": [4], "min_tokens": 2}, [1, 4], 100, ("stop", 4)),
        ({"min_tokens": 3}, [1, 9], 100, None),
        ({"max_tokens": 2}, [1, 1], 100, ("length", None)),
        ({"max_tokens": 2}, [1, 9], 100, ("stop", None)),
        ({"max_tokens": 3}, [1, 1], 100, None),
        ({"max_tokens": None}, [1, 1], 100, None),
        ({"max_tokens": None}, [1, 1], 2, ("length", None)),
        ({"min_tokens": 3}, [1, 9], 2, ("length", None)),
    ],
)
def test_check_stop(
    options: dict[str, Any], output: list[int], room: int, expected: tuple[str, int | None] | None
) -> None:
    """One token too many or too few; stopping inside min_tokens; running over the model's end."""
    assert (
        check_stop(SamplingParams(**options), output[-1], len(output), frozenset({9}), room)
        == expected
    )
