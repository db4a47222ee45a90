"""Kinds of tokens, on invented vocabularies and on the default model's."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenrouter.features import TokenType, TokenTypeTable, token_types
from tokenrouter.features.vocabulary import vocabulary_texts

EXAMPLES = {
    TokenType.SPECIAL: [None],
    TokenType.NEWLINE: ["\n", "\n\n  ", ".\n", "\r\n"],
    TokenType.NUMBER: ["7", " 2024", "3.14", "1,000", "٣"],
    TokenType.PUNCTUATION: [".", ", ", " (", "...", '."', " —", "。", "？", "-"],
    TokenType.FUNCTION_WORD: [" the", "The", " THE", "'s", " and", "的", " cannot"],
    TokenType.CODE: [
        "\t",
        "    ",
        " ==",
        "();",
        "__init__",
        " self",
        ".get",
        "camelCase",
        "x1",
        "):",
    ],
    TokenType.ENTITY: [" Paris", "NASA", " O'Neill"],
    TokenType.PLAIN: [" ", "", "ing", " river", "the", " B", "猫", "\ufffd", "😀", " naïve"],
}


@pytest.mark.parametrize(
    ("kind", "text"), [(kind, text) for kind, texts in EXAMPLES.items() for text in texts]
)
def test_examples(kind: TokenType, text: str | None) -> None:
    """Guards the table's meaning: routes.png and every type rule read it."""
    assert TokenType(int(TokenTypeTable.from_texts([text]).types_V[0])) is kind


def test_line_start_is_a_capitalised_word_without_space() -> None:
    """Guards against " The" (mid-sentence) and "the" (a subword) passing as the start of a line."""
    table = TokenTypeTable.from_texts(["The", " The", "the", "T", "\nThe", "I'm", None, ""])
    assert table.line_start_V.tolist() == [True, False, False, True, False, False, False, False]


def test_parse_refuses_an_unknown_label() -> None:
    """Guards against a misspelt type in a config that silently matches nothing."""
    assert TokenType.parse("function_word") is TokenType.FUNCTION_WORD
    with pytest.raises(ValueError, match="'digits'; token types: special, newline, number"):
        TokenType.parse("digits")


class FakeTokenizer:
    """A vocabulary in SentencePiece's spelling."""

    pieces = ("<s>", "<0x0A>", "▁the", "▁", "▁▁", "Ġ", "ing", "<tool>")
    all_special_ids = (0,)
    added_tokens_decoder = {  # noqa: RUF012
        0: SimpleNamespace(content="<s>", special=True),
        7: SimpleNamespace(content="<tool>", special=False),
    }

    def __len__(self) -> int:
        return len(self.pieces)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.pieces[i] for i in ids]


def test_sentencepiece_and_padded_vocabularies() -> None:
    """Guards against SentencePiece read as byte-level, and padding ids read as text."""
    texts = vocabulary_texts(FakeTokenizer(), 10)
    assert texts == [None, "\n", " the", " ", "  ", "Ġ", "ing", None, None, None]
    assert vocabulary_texts(FakeTokenizer(), 3) == texts[:3]


def test_a_tokenizer_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a table per engine; against one that outlives its tokenizer or misses an added token."""
    reads: list[int] = []

    def counted(tokenizer: Any, vocab_size: int) -> list[str | None]:
        reads.append(vocab_size)
        return vocabulary_texts(tokenizer, vocab_size)

    monkeypatch.setattr(token_types, "vocabulary_texts", counted)
    one, other = FakeTokenizer(), FakeTokenizer()
    table = TokenTypeTable.from_tokenizer(one, 10)
    assert TokenTypeTable.from_tokenizer(one, 10) is table
    assert TokenTypeTable.from_tokenizer(other, 10) is not table
    assert TokenTypeTable.from_tokenizer(one, 8).types_V.shape == (8,)
    assert reads == [10, 10, 8]
    one.pieces = (*FakeTokenizer.pieces, "▁new")
    grown = TokenTypeTable.from_tokenizer(one, 10)
    assert (table.types_V[8], grown.types_V[8]) == (TokenType.SPECIAL, TokenType.PLAIN)
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None


def test_default_vocabulary_reads_as_the_tokenizer_decodes(smollm2_tokenizer: Any) -> None:
    """Guards against a wrong byte alphabet: compares all texts with the tokenizer's own decoder."""
    size = len(smollm2_tokenizer)
    texts = vocabulary_texts(smollm2_tokenizer, size)
    decoded = smollm2_tokenizer.backend_tokenizer.decode_batch(
        [[i] for i in range(size)], skip_special_tokens=False
    )
    assert [i for i in range(size) if texts[i] not in (None, decoded[i])] == []
    special = [i for i in range(size) if texts[i] is None]
    assert special == sorted(smollm2_tokenizer.added_tokens_decoder)


def test_default_vocabulary_types(smollm2_tokenizer: Any) -> None:
    """Guards against a table in which a whole kind is empty or swallows the others."""
    table = TokenTypeTable.from_tokenizer(smollm2_tokenizer, 49_152)
    assert table.types_V.shape == table.line_start_V.shape == (49_152,)
    assert table.types_V.dtype == torch.int64
    count_Y = torch.bincount(table.types_V)
    assert len(count_Y) == len(TokenType) and count_Y.min() >= 10
    assert count_Y[TokenType.SPECIAL] == 17 and count_Y[TokenType.NUMBER] == 10
    assert count_Y[TokenType.PLAIN] < 40_000

    ids = smollm2_tokenizer("In Paris, 7 cats\n    self.x ==")["input_ids"]
    labels = [TokenType(kind).label for kind in table.types_V[ids].tolist()]
    assert labels[:4] == ["function_word", "entity", "punctuation", "plain"]
    assert "number" in labels and "newline" in labels and labels[-1] == "code"
