"""Guards the comparison of texts: lengths or characters of the wrong side, a difference where one text ends."""

import importlib.util
from typing import Any

import pytest

from tokenrouter.evaluation import generations
from tokenrouter.evaluation.generations import (
    Generation,
    chrf,
    compare_generations,
    first_difference,
    until_end,
)


@pytest.mark.parametrize(
    ("before", "after", "token"),
    [
        ((1, 2, 3), (1, 2, 3), None),
        ((1, 2, 3), (1, 5, 4), 1),
        ((1, 2), (1, 2, 3), 2),
        ((1, 2, 3), (1, 2), 2),
        ((), (), None),
        ((), (4,), 0),
    ],
)
def test_the_first_difference(
    before: tuple[int, ...], after: tuple[int, ...], token: int | None
) -> None:
    """A text that stops early taken for the same one."""
    assert first_difference(before, after) == token


def test_texts_are_compared_prompt_by_prompt() -> None:
    """A ratio upside down; a mean that leaves out the texts that are the same."""
    high = [Generation([1, 2, 3, 4], "abcd"), Generation([5, 6], "ef")]
    own = [Generation([1, 2, 9, 9, 9, 9, 9], "abxxxxx"), Generation([5, 6], "ef")]
    found = compare_generations(own, high)
    assert (found.num_texts, found.same_output_frac, found.common_tokens_mean) == (2, 0.5, 2.0)
    assert found.length_ratio == 9 / 6
    same = compare_generations(high, high)
    assert (same.same_output_frac, same.length_ratio) == (1.0, 1.0)
    assert same.common_tokens_mean == 3.0


def test_chrf_is_that_of_the_others_text() -> None:
    """Own and reference exchanged: recall counts twice, so a text cut short must lose more than a longer one."""
    pytest.importorskip("sacrebleu")
    whole, half = "the quick brown fox jumps over", "the quick brown"
    shorter, longer = chrf([half], [whole]), chrf([whole], [half])
    assert shorter is not None and longer is not None and 0 < shorter < longer < 100
    assert chrf([whole, " "], [whole, ""]) == pytest.approx(100.0)
    assert chrf([""], [""]) == 100.0 and chrf([""], ["word"]) == 0.0


def test_without_sacrebleu_there_is_no_chrf(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ImportError when every request has been served."""
    find = importlib.util.find_spec

    def without(name: str) -> Any:
        return None if name == "sacrebleu" else find(name)

    monkeypatch.setattr(generations.importlib.util, "find_spec", without)
    text = [Generation([1], "a")]
    found = compare_generations(text, text)
    assert found.chrf is None and found.same_output_frac == 1.0


def test_a_text_ends_with_its_end() -> None:
    """What requests generate behind it, as they ignore it, counted as part of the answer."""
    assert until_end([4, 5, 0, 6, 0], {0, 9}) == [4, 5, 0]
    assert until_end([4, 5], {0}) == [4, 5] and until_end([], {0}) == []


@pytest.mark.parametrize(("own", "other"), [(0, 0), (1, 2)])
def test_texts_of_other_prompts_are_refused(own: int, other: int) -> None:
    text = Generation([1], "a")
    with pytest.raises(ValueError, match=f"^{own} and {other} texts cannot be compared"):
        compare_generations([text] * own, [text] * other)
