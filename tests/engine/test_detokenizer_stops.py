"""Guards where streamed text ends: nothing of a stop string leaks, and nothing before it is lost or held for ever."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.detokenizing import PROMPT, checked, decode, stream, texts
from tokenrouter.engine.detokenizer import IncrementalDetokenizer
from tokenrouter.sampling_params import SamplingParams


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int, str] | None:
    """End, start and name of the stop string that is complete first, character by character."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end, end - len(longest), longest
    return None


@settings(checked, max_examples=300)
@given(data=st.data(), include=st.booleans())
def test_stop_strings_never_leak(
    smollm2_tokenizer: Any, data: st.DataObject, include: bool
) -> None:
    """Stop strings over several tokens, inside one, overlapping, or part of each other."""
    text = data.draw(texts.filter(bool))
    cuts = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 8))
    part = cuts.map(lambda cut: text[cut[0] : cut[0] + cut[1]])
    random = st.text(alphabet="ab\u4e2d\U0001f600", min_size=1, max_size=4)
    stops = data.draw(st.lists(st.one_of(part, random), min_size=1, max_size=3))
    ids = smollm2_tokenizer.encode(text)
    whole = decode(smollm2_tokenizer, ids)
    detokenizer, _ = stream(
        smollm2_tokenizer, ids, stop=stops, include_stop_str_in_output=include
    )  # shown pieces are never taken back: text == joined pieces after every token
    hit = first_stop(whole, stops)
    if hit is None:
        assert (detokenizer.text, detokenizer.stop_hit) == (whole, None)
    else:
        end, start, stop = hit
        assert detokenizer.stop_hit == stop
        assert detokenizer.text == whole[: end if include else start]


def test_no_more_is_held_than_may_be_a_stop_string(smollm2_tokenizer: Any) -> None:
    """Holding a fixed number of characters delays every stream by the longest stop string."""
    params = SamplingParams(stop=["\nUser:", "###"])
    detokenizer = IncrementalDetokenizer(smollm2_tokenizer, params, PROMPT)
    shown = []
    for piece in ("Hello", "\n", "Us", "age", "##", " #"):
        for token in smollm2_tokenizer.encode(piece):
            detokenizer.append(token)
        shown.append(detokenizer.take_delta())
    assert shown == ["Hello", "", "", "\nUsage", "", "## "]
    assert detokenizer.finish("length") == "length"
    assert detokenizer.take_delta() == "#"


def test_the_stop_string_complete_first_counts(smollm2_tokenizer: Any) -> None:
    """Taking the first of the list leaves an earlier stop string in the text."""
    ids = smollm2_tokenizer.encode("look at this")
    detokenizer, _ = stream(smollm2_tokenizer, ids, stop=["this", "at"])
    assert (detokenizer.text, detokenizer.stop_hit) == ("look ", "at")
    detokenizer, _ = stream(smollm2_tokenizer, ids, stop=["t", " at"])
    assert (detokenizer.text, detokenizer.stop_hit) == ("look", " at")


def test_after_a_stop_string_nothing_changes(smollm2_tokenizer: Any) -> None:
    """Tokens computed ahead must not add text after the end."""
    params = SamplingParams(stop="b")
    detokenizer = IncrementalDetokenizer(smollm2_tokenizer, params, PROMPT)
    for token in smollm2_tokenizer.encode("a b c d"):
        detokenizer.append(token)
    assert detokenizer.finish("length") == "stop"
    detokenizer.append(smollm2_tokenizer.encode("e")[0])
    assert (detokenizer.text, detokenizer.take_delta(), detokenizer.stop_hit) == ("a ", "a ", "b")


@pytest.mark.parametrize("split", [False, True])
def test_no_stop_string_before_min_tokens(smollm2_tokenizer: Any, split: bool) -> None:
    """A stop string inside min_tokens is plain text; one that is complete later counts."""
    ids = smollm2_tokenizer.encode("a b c b d b")
    assert len(ids) == 6
    stop = "c b" if split else "b"
    texts = {n: stream(smollm2_tokenizer, ids, stop=stop, min_tokens=n)[0].text for n in range(7)}
    if split:
        assert texts == {**dict.fromkeys(range(5), "a b "), 5: "a b c b d b", 6: "a b c b d b"}
    else:
        assert texts == {
            **dict.fromkeys(range(3), "a "),
            3: "a b c ",
            4: "a b c ",
            5: "a b c b d ",
            6: "a b c b d ",
        }


def test_what_min_tokens_let_through_is_not_found_later(smollm2_tokenizer: Any) -> None:
    """A passed stop string that is held for another one, or held for itself."""
    params = SamplingParams(stop=["a b", "a b a b!"], min_tokens=3)
    detokenizer = IncrementalDetokenizer(smollm2_tokenizer, params, PROMPT)
    for token in smollm2_tokenizer.encode("a b c"):
        detokenizer.append(token)
    assert (detokenizer.text, detokenizer.stop_hit) == ("a b c", None)

    params = SamplingParams(stop="a", min_tokens=3)
    detokenizer = IncrementalDetokenizer(smollm2_tokenizer, params, PROMPT)
    detokenizer.append(smollm2_tokenizer.encode("a")[0])
    assert detokenizer.take_delta() == "a"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "a b"),
        ({"skip_special_tokens": False}, "a b"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "a b<|im_end|>"),
        ({"skip_special_tokens": False, "ignore_eos": True}, "a b<|im_end|>"),
        ({"skip_special_tokens": False, "min_tokens": 4}, "a b<|im_end|>"),
        ({"ignore_eos": True}, "a b"),
    ],
)
def test_the_eos_token_is_not_text(
    smollm2_tokenizer: Any, options: dict[str, Any], expected: str
) -> None:
    """An answer that ends in <|im_end|>; or one that hides it where it is an ordinary token."""
    eos = smollm2_tokenizer.eos_token_id
    ids = [*smollm2_tokenizer.encode("a b"), eos]
    assert stream(smollm2_tokenizer, ids, eos=frozenset({eos}), **options)[0].text == expected


def test_a_stop_id_is_not_text_and_frees_what_was_held(smollm2_tokenizer: Any) -> None:
    """Text held for a stop string is lost when the output ends in another way."""
    ids = smollm2_tokenizer.encode("one two three")
    found, _ = stream(smollm2_tokenizer, ids, stop_token_ids=[ids[-1]], stop=" two!")
    assert found.text == "one two"
    found, _ = stream(
        smollm2_tokenizer, ids, stop_token_ids=[ids[-1]], include_stop_str_in_output=True
    )
    assert found.text == "one two three"


def test_a_stop_string_at_the_very_end(smollm2_tokenizer: Any) -> None:
    """What only the flush makes visible is searched as well, and the reason becomes stop."""
    ids = smollm2_tokenizer.encode("ab \U0001f469")[:-1]
    params = SamplingParams(stop=" \ufffd")
    detokenizer = IncrementalDetokenizer(smollm2_tokenizer, params, PROMPT)
    for token in ids:
        detokenizer.append(token)
    assert detokenizer.text == "ab"  # the space may belong to it
    assert detokenizer.finish("length") == "stop"
    assert (detokenizer.text, detokenizer.stop_hit) == ("ab", " \ufffd")
