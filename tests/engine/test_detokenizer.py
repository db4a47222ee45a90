"""Guards streamed text: whole characters, and joined pieces are the whole."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.engine.detokenizing import ALPHABET, PROMPT, checked, decode, stream, texts
from tokenrouter.engine.detokenizer import IncrementalDetokenizer
from tokenrouter.sampling_params import SamplingParams


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
