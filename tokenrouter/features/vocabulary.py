"""The text of every id in a tokenizer's vocabulary."""

from typing import Any


def vocabulary_texts(tokenizer: Any, vocab_size: int) -> list[str | None]:
    """Text per id, spaces as spaces; None for control tokens and ids beyond the tokenizer's.

    Reads byte-level BPE (GPT-2's alphabet of 256 printable stand-ins) and SentencePiece (U+2581 for
    a space, ``<0x0A>`` for a byte), told apart by the space marker that the vocabulary uses. What
    is a part of a multi-byte character becomes U+FFFD.

    Args:
        tokenizer: a transformers tokenizer.
        vocab_size: length of the result.
    """
    known = min(len(tokenizer), vocab_size)
    pieces: list[str | None] = tokenizer.convert_ids_to_tokens(list(range(known)))
    special = set(tokenizer.all_special_ids)
    for token_id, added in tokenizer.added_tokens_decoder.items():
        if added.special or (added.content[:1] in "<[" and added.content[-1:] in ">]"):
            special.add(token_id)
    byte_level = _uses_byte_alphabet(pieces)
    to_byte = _byte_alphabet()
    texts: list[str | None] = []
    for token_id, piece in enumerate(pieces):
        if piece is None or token_id in special:
            texts.append(None)
        elif byte_level:
            texts.append(_from_byte_alphabet(piece, to_byte))
        else:
            texts.append(_from_sentencepiece(piece))
    return texts + [None] * (vocab_size - known)


def _uses_byte_alphabet(pieces: list[str | None]) -> bool:
    """Whether more pieces begin with byte-level BPE's space marker than with SentencePiece's."""
    firsts = [piece[0] for piece in pieces if piece]
    return firsts.count("\u0120") > firsts.count("\u2581")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {chr(256 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | stand_ins


def _from_byte_alphabet(piece: str, to_byte: dict[str, int]) -> str:
    try:
        return bytes([to_byte[c] for c in piece]).decode("utf-8", errors="replace")
    except KeyError:  # an added token, spelt as it is
        return piece


def _from_sentencepiece(piece: str) -> str:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)]).decode("utf-8", errors="replace")
    return piece.replace("\u2581", " ")
