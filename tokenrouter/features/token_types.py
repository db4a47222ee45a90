"""What kind of text each id of a vocabulary stands for, decided once per tokenizer.

Shape letters: V vocabulary.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tokenrouter.features.vocabulary import vocabulary_texts


class TokenType(IntEnum):
    """The kinds of tokens; the text of a subword is judged by itself, without its neighbours.

    - ``special``: control tokens, and ids that the tokenizer does not know.
    - ``newline``: holds a line break.
    - ``number``: digits without letters.
    - ``punctuation``: prose marks only.
    - ``function_word``: a whole word of the closed classes (English, some Chinese).
    - ``code``: operators, indentation, identifiers, keywords.
    - ``entity``: a capitalised word.
    - ``plain``: all the rest.
    """

    SPECIAL = 0
    NEWLINE = 1
    NUMBER = 2
    PUNCTUATION = 3
    FUNCTION_WORD = 4
    CODE = 5
    ENTITY = 6
    PLAIN = 7

    @property
    def label(self) -> str:
        """The name used in configs, tables and plots."""
        return self.name.lower()

    @classmethod
    def parse(cls, label: str) -> "TokenType":
        """The type called ``label``; raises ValueError with the choices."""
        for token_type in cls:
            if token_type.label == label:
                return token_type
        raise ValueError(f"no token type {label!r}; token types: {', '.join(t.label for t in cls)}")


NO_TOKEN = len(TokenType)
"""The type of no token, as before position 0: one more than the last type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTypeTable:
    """Per vocabulary id what is known from its text alone.

    Attributes:
        types_V: int64 ``TokenType``.
        line_start_V: bool, a capitalised word without a leading space: mostly the first of a line,
            a quote or a bracket.
        types_or_none_V: int64, ``types_V`` and behind it ``NO_TOKEN``, which an id of -1 finds.
        log_frequency_V: float32, -ln(1 + id).
    """

    types_V: Tensor
    line_start_V: Tensor
    types_or_none_V: Tensor = field(init=False)
    log_frequency_V: Tensor = field(init=False)

    def __post_init__(self) -> None:
        types_or_none_V = torch.nn.functional.pad(self.types_V, (0, 1), value=NO_TOKEN)
        object.__setattr__(self, "types_or_none_V", types_or_none_V)
        log_frequency_V = -torch.arange(len(self.types_V)).float().log1p()
        object.__setattr__(self, "log_frequency_V", log_frequency_V)

    @property
    def is_special_V(self) -> Tensor:
        """Bool, the ids of type special: they begin a turn."""
        return self.types_V == TokenType.SPECIAL

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, vocab_size: int) -> "TokenTypeTable":
        """Reads every id once (byte-level BPE and SentencePiece) and types it.

        One tokenizer has one table, made when it is first asked for and kept as long as the
        tokenizer lives; tokens added to it make a new one.

        Args:
            tokenizer: a transformers tokenizer.
            vocab_size: the model's; ids beyond the tokenizer's own are padding and become special.
        """
        of_sizes = _TABLES.setdefault(tokenizer, {})
        sizes = len(tokenizer), vocab_size
        if sizes not in of_sizes:
            of_sizes[sizes] = cls.from_texts(vocabulary_texts(tokenizer, vocab_size))
        return of_sizes[sizes]

    @classmethod
    def from_texts(cls, texts: Sequence[str | None]) -> "TokenTypeTable":
        """The table of a vocabulary given as text per id; None marks a special token."""
        is_line_start = [bool(text and _LINE_START.fullmatch(text)) for text in texts]
        return cls(
            types_V=torch.tensor([_classify(text) for text in texts], dtype=torch.int64),
            line_start_V=torch.tensor(is_line_start, dtype=torch.bool),
        )


_TABLES: WeakKeyDictionary[Any, dict[tuple[int, int], TokenTypeTable]] = WeakKeyDictionary()

_FUNCTION_WORDS = frozenset(
    """
    a an the this that these those each every either neither some any no all both half such what
    which whose i me my mine myself you your yours yourself he him his himself she her hers herself
    it its itself we us our ours ourselves they them their theirs themselves who whom someone anyone
    everyone something anything nothing everything
    and or but nor so yet for if because although though while whereas unless until since when
    whenever where wherever whether than as that lest once
    of in on at by to from with without within into onto upon over under above below between among
    through during before after about against across along around behind beside besides beyond
    despite down up off out near toward towards per via like
    am is are was were be been being do does did done have has had having will would shall should
    can could may might must ought not n't cannot there here then thus hence how why also only too
    very just 's 're 've 'll 'd 'm 't
    的 了 在 是 和 与 也 就 都 而 及 着 或 我 你 他 她 它 我们 你们 他们 这 那 这个 那个 一个 有 不
    对 为 以 于 被 把 从 到
    """.split()
)
_KEYWORDS = frozenset(
    """
    def elif lambda async await yield none nonetype self cls kwargs args const func fn struct enum
    impl mut pub void int float bool str char uint int8 int16 int32 int64 uint8 uint32 uint64
    typedef sizeof nullptr null nil printf println stdin stdout stderr foreach endif ifdef ifndef
    typename namespace http https html href div php elseif isinstance init len dict tuple var ptr
    malloc numpy argv regex utf json
    """.split()
)
_PROSE_MARKS = frozenset(".,;:!?'\"()-…–—‘’“”«»¿¡、。，；：！？（）「」『』《》·\ufe0f")
_CALL_MARKS = re.compile(r"""\(\)|\(['"]|['"]\)|\)\)|\(\(|\):""")
_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_CAMEL = re.compile(r"[a-z][A-Z]")
_LINE_START = re.compile(r"[A-Z][A-Za-z]*")


def _classify(text: str | None) -> TokenType:
    """The type of one token's text (None: special)."""
    if text is None:
        return TokenType.SPECIAL
    if "\n" in text or "\r" in text:
        return TokenType.NEWLINE
    word = text.strip()
    if not word:
        return TokenType.CODE if len(text) > 1 or text == "\t" else TokenType.PLAIN
    starts_word = text[0] == " " or word[0].isupper() or word[0] == "'" or not word.isascii()
    if starts_word and word.lower() in _FUNCTION_WORDS:
        return TokenType.FUNCTION_WORD
    return _classify_word(word) if _WORD.fullmatch(word) else _classify_marks(word)


def _classify_word(word: str) -> TokenType:
    """A token of letters, with apostrophes and hyphens between them."""
    if word.lower() in _KEYWORDS or _CAMEL.search(word):
        return TokenType.CODE
    return TokenType.ENTITY if len(word) > 1 and word[0].isupper() else TokenType.PLAIN


def _classify_marks(text: str) -> TokenType:
    """A token with something in it besides letters."""
    has_letter = any(map(str.isalpha, text))
    if not has_letter and any(map(str.isdigit, text)):
        return TokenType.NUMBER
    if _PROSE_MARKS.issuperset(text) and not _CALL_MARKS.search(text):
        return TokenType.PUNCTUATION
    has_ascii_mark = any(c.isascii() and not c.isalpha() for c in text)
    return TokenType.CODE if has_ascii_mark else TokenType.PLAIN
