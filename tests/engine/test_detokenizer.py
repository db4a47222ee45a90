"""Guards streamed text: whole characters, nothing of a stop string, joined pieces are the whole."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenrouter.engine.detokenizer import IncrementalDetokenizer
from tokenrouter.sampling_params import SamplingParams

checked = settings(deadline=None, max_examples=200)
ALPHABET = (
    "abc .\n\u00e9e\u0301\u4e2d\u6587\u3042\ud55c\U0001f600\U0001f469\u200d\U0001f467\ufffd\u0301"
)
texts = st.one_of(
    st.text(max_size=40),
    st.text(alphabet=ALPHABET, max_size=60),
    st.text(alphabet="ab", max_size=60),
)
PROMPT = [504, 1528]


def decode(tokenizer: Any, ids: Sequence[int], *, skip: bool = True) -> str:
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    )


def stream(
    tokenizer: Any, ids: Sequence[int], prompt: Sequence[int] = PROMPT, **options: Any
) -> tuple[IncrementalDetokenizer, list[str]]:
    """The detokenizer at the end, and the pieces; checks what holds for every stream."""
    eos = options.pop("eos", frozenset())
    params = SamplingParams(max_tokens=None, **options)
    detokenizer, pieces = IncrementalDetokenizer(tokenizer, params, prompt, eos), []
    for token in ids:
        detokenizer.append(token)
        pieces.append(detokenizer.take_delta())
        assert detokenizer.text == "".join(pieces)
        if detokenizer.stop_hit is not None:
            break
    detokenizer.finish("length")
    pieces.append(detokenizer.take_delta())
    assert detokenizer.text == "".join(pieces)
    assert detokenizer.take_delta() == ""
    return detokenizer, pieces


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int, str] | None:
    """End, start and name of the stop string that is complete first, character by character."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end, end - len(longest), longest
    return None


@pytest.fixture(scope="module")
def broken_ids(smollm2_tokenizer: Any) -> list[int]:
    """Tokens that are a part of a character."""
    ids = [i for i in range(17, 300) if "\ufffd" in decode(smollm2_tokenizer, [i])]
    assert len(ids) > 50
    return ids


@checked
@given(text=texts)
@example(
    text="\U0001f469\u200d\U0001f469\u200d\U0001f467 \u4e2d\u6587 e\u0301 \U0001f1e8\U0001f1f3"
)
@example(text="\ufffd\ufffd\U0001f600\ufffd")
def test_pieces_joined_are_the_text(smollm2_tokenizer: Any, text: str) -> None:
    """A multi-byte character cut in two shows as question marks, or a piece is lost or doubled."""
    ids = smollm2_tokenizer.encode(text)
    whole = decode(smollm2_tokenizer, ids)
    detokenizer, pieces = stream(smollm2_tokenizer, ids)
    assert detokenizer.text == whole
    assert "".join(pieces).count("\ufffd") == whole.count("\ufffd")


@checked
@given(data=st.data(), skip=st.booleans())
def test_any_ids_decode_as_the_tokenizer_does(
    smollm2_tokenizer: Any, broken_ids: list[int], data: st.DataObject, skip: bool
) -> None:
    """Models emit broken bytes, special tokens and padding ids; text must still add up."""
    ids = data.draw(
        st.lists(
            st.one_of(
                st.sampled_from(broken_ids),
                st.integers(0, 16),
                st.integers(17, 49_151),
                st.just(50_000),
            ),
            max_size=60,
        )
    )
    detokenizer, _ = stream(smollm2_tokenizer, ids, skip_special_tokens=skip)
    assert detokenizer.text == decode(smollm2_tokenizer, ids, skip=skip)


def test_unfinished_characters_wait(smollm2_tokenizer: Any) -> None:
    """A question mark that a later piece cannot take back."""
    ids = smollm2_tokenizer.encode("a\U0001f469\u200d\U0001f467b")
    detokenizer = IncrementalDetokenizer(smollm2_tokenizer, SamplingParams(), PROMPT)
    shown = []
    for token in ids:
        detokenizer.append(token)
        shown.append(detokenizer.take_delta())
    assert len([piece for piece in shown if piece == ""]) >= 4  # bytes that waited
    assert [piece for piece in shown if piece] == ["a", "\U0001f469", "\u200d", "\U0001f467", "b"]


def test_an_unfinished_end_is_shown_as_the_tokenizer_decodes_it(smollm2_tokenizer: Any) -> None:
    """Text held back for ever: the output is shorter than its tokens say."""
    ids = smollm2_tokenizer.encode("ab \U0001f469")[:-1]
    detokenizer, pieces = stream(smollm2_tokenizer, ids)
    assert pieces[-1] == "\ufffd"
    assert detokenizer.text == decode(smollm2_tokenizer, ids) == "ab \ufffd"


def test_a_character_that_the_prompt_began(smollm2_tokenizer: Any) -> None:
    """The character is as long as the prompt's question mark, so it looks like no new text."""
    ids = smollm2_tokenizer.encode("ab \U0001f469 cd")
    cut = next(i for i in range(1, len(ids)) if decode(smollm2_tokenizer, ids[:i])[-1] == "\ufffd")
    detokenizer, _ = stream(smollm2_tokenizer, ids[cut:], prompt=ids[:cut])
    assert detokenizer.text == "\U0001f469 cd"
    detokenizer, _ = stream(smollm2_tokenizer, smollm2_tokenizer.encode(" cd"), prompt=ids[:cut])
    assert detokenizer.text == " cd"


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


class ChunkTokenizer:
    """Token i is the i-th chunk of bytes; a space that comes first is dropped, as in Llama 2.

    Remembers the longest window it was asked to decode.
    """

    is_fast = False
    all_special_ids = ()

    def __init__(self, chunks: Sequence[bytes], *, strips: bool = False) -> None:
        self.chunks = chunks
        self.strips = strips
        self.longest = 0

    def __len__(self) -> int:
        return len(self.chunks)

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        self.longest = max(self.longest, len(ids))
        text = b"".join(self.chunks[i] for i in ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips else text


@settings(checked, max_examples=300)
@given(
    text=st.one_of(texts.map(str.encode), st.binary(max_size=80), st.just(b"")),
    unit=st.one_of(st.text(alphabet=ALPHABET, max_size=3).map(str.encode), st.binary(max_size=4)),
    size=st.integers(1, 5),
    first=st.integers(0, 4),
)
@example(text=b"", unit="\u4e2d".encode(), size=3, first=1)  # every token ends and begins one
def test_characters_cut_anywhere(text: bytes, unit: bytes, size: int, first: int) -> None:
    """Tokens that end one character and begin the next never leave a whole text to cut at."""
    data = text + unit * 60
    chunks = [data[:first], *(data[i : i + size] for i in range(first, len(data), size))]
    tokenizer = ChunkTokenizer(chunks)
    detokenizer, pieces = stream(tokenizer, range(len(chunks)), prompt=[])
    assert detokenizer.text == data.decode("utf-8", "replace")
    assert tokenizer.longest <= 40
    for count in range(0, len(chunks), 7):
        so_far = b"".join(chunks[:count]).decode("utf-8", "replace").rstrip("\ufffd")
        assert "".join(pieces[:count]).startswith(so_far)


@pytest.mark.parametrize(
    "chunks", [[b" a", b"", b"", b" b"], [b"a", b"\xe4", *[b""] * 40, b"\xb8\xad", b" b"]]
)
def test_tokens_without_text(chunks: list[bytes]) -> None:
    """As the only context they take a space away, or separate a character from its start."""
    tokenizer = ChunkTokenizer(chunks, strips=True)
    detokenizer, _ = stream(tokenizer, range(len(chunks)), prompt=[])
    assert detokenizer.text == tokenizer.decode(range(len(chunks)))


@pytest.mark.parametrize("kind", ["text", "broken bytes", "special", "replacement"])
def test_the_work_per_token_does_not_grow(
    smollm2_tokenizer: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids without characters grow the window: quadratic time, with ignore_eos in benchmarks."""
    lead, follow, *_ = smollm2_tokenizer.encode("\U0001f469")
    ids = {
        "text": smollm2_tokenizer.encode("one two three, \U0001f469 four. " * 60),
        "broken bytes": [lead, follow, lead] * 200,
        "special": [smollm2_tokenizer.eos_token_id] * 600,
        "replacement": smollm2_tokenizer.encode("\ufffd" * 500),
    }[kind]
    assert len(ids) > 400
    whole, usual, windows = decode(smollm2_tokenizer, ids), smollm2_tokenizer.decode, []

    def counting(ids: list[int], **options: Any) -> Any:
        windows.append(len(ids))
        return usual(ids, **options)

    monkeypatch.setattr(smollm2_tokenizer, "decode", counting)
    assert stream(smollm2_tokenizer, ids)[0].text == whole
    assert max(windows) <= 40
    assert sum(windows) <= 30 * len(ids) + 30


def test_without_detokenizing_there_is_no_text() -> None:
    """Benchmarks switch text off; a model may even have no tokenizer."""
    detokenizer, _ = stream(None, [1, 2, 3], detokenize=False)
    assert (detokenizer.text, detokenizer.stop_hit) == ("", None)


@pytest.fixture(scope="module")
def spaced_tokenizer() -> Any:
    """A Llama-2-like tokenizer: a space belongs to the word after it, unknown bytes are tokens."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "\u2581Hello", "\u2581world", "!", *(f"<0x{b:02X}>" for b in range(256))]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_the_space_before_a_word_is_kept(spaced_tokenizer: Any) -> None:
    """Decoding each token by itself strips its space: "Helloworld"."""
    detokenizer, pieces = stream(spaced_tokenizer, [2, 1, 3], prompt=[1])
    assert pieces[:3] == [" world", " Hello", "!"]
    assert detokenizer.text == " world Hello!"  # the prompt's continuation


@pytest.mark.parametrize("hidden", [0, 5000])
def test_the_space_after_hidden_tokens_is_kept(spaced_tokenizer: Any, hidden: int) -> None:
    """Special tokens and padding ids leave no text: as context they would take the space away."""
    detokenizer, _ = stream(spaced_tokenizer, [2, *[hidden] * 40, 1], prompt=[1, *[hidden] * 9])
    assert detokenizer.text == " world Hello"


def test_byte_tokens_wait_for_their_character(spaced_tokenizer: Any) -> None:
    """Byte fallback decodes a run of bytes as a whole or not at all."""
    ids = [2, *(4 + b for b in "\u4e2d\U0001f600".encode()), 1]
    detokenizer, pieces = stream(spaced_tokenizer, ids, prompt=[1])
    assert [piece for piece in pieces if piece] == [" world", "\u4e2d", "\U0001f600", " Hello"]
    assert detokenizer.text == " world\u4e2d\U0001f600 Hello"
