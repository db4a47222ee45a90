"""Synthetic tasks whose answer stands far back in the context: copying a list of words, and values by their keys.

An item is a context, in which the words stand among other text, and a question. The answers come behind it,
teacher-forced; each is a choice among the item's own words by their first tokens' logits.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

Encode = Callable[[str], list[int]]

WORDS = """apple river table window garden mountain paper music winter summer bridge letter doctor teacher market
kitchen island forest engine silver golden yellow purple orange horse tiger rabbit monkey chicken turtle spider
butter cheese bread sugar coffee water bottle basket pocket jacket shirt button needle thread carpet mirror candle
hammer ladder bucket shovel anchor castle tower palace temple church school office station airport harbor village
city country desert valley ocean beach storm thunder rain snow cloud shadow light morning evening night spring autumn
farmer soldier sailor captain king queen prince writer painter singer dancer driver pilot baker brother sister
mother father cousin friend neighbor stranger giant dragon robot rocket planet moon star comet guitar piano violin
drum trumpet pencil notebook camera phone radio clock calendar""".split()

COPIED, REPEATED = 16, 8
PAIRS, SHOWN = 6, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A context, a question and its answers.

    Attributes:
        task: copy or key_value.
        ids: all of it.
        question_at: where the question begins.
        prompt_len: where it ends; the others are fed one by one.
        answers: positions of the answers in ``ids``, each at least two tokens behind the question's end: the token that
            predicts it is read when the question has been.
        choices: token ids that an answer is chosen among.
    """

    task: str
    ids: list[int]
    question_at: int
    prompt_len: int
    answers: tuple[int, ...]
    choices: tuple[int, ...]

    @property
    def chance_frac(self) -> float:
        """Accuracy of a uniform guess."""
        return 1 / len(self.choices)

    def without_context(self) -> "Item":
        """The question and its answers alone: what of them needs no context."""
        first = self.question_at
        return replace(
            self,
            ids=self.ids[first:],
            question_at=0,
            prompt_len=self.prompt_len - first,
            answers=tuple(answer - first for answer in self.answers),
        )


def make_items(
    encode: Encode, text_ids: Sequence[int], count: int, *, context: int, question: int
) -> list[Item]:
    """Items of both tasks, each with another part of the text as its filler.

    Args:
        encode: text to token ids.
        text_ids: of the other text, long enough for all.
        count: of each task.
        context: tokens before which every context ends.
        question: tokens behind it that the question, and other text before it, take.

    Raises:
        ValueError: an item does not fit.
    """
    made = []
    for index, draft in enumerate((_copy, _key_value) * count):
        start = index * (context + question)
        filler = list(text_ids[start : start + context + question])
        made.append(_laid_out(draft(encode, random.Random(index)), filler, context, question))
    return made


@dataclass(frozen=True, kw_only=True, slots=True)
class _Draft:
    """What an item says, in token ids: ``pieces`` stand apart in the context, ``cue`` comes before the answers."""

    task: str
    pieces: list[list[int]]
    question: list[int]
    cue: list[int]
    answers: list[list[int]]
    choices: list[list[int]]


def _copy(encode: Encode, chance: random.Random) -> _Draft:
    """16 words; 7 of them again are the question, one more is the cue, the other 8 are the answers."""
    parts = [encode(f" {word}") for word in chance.sample(WORDS, COPIED)]
    title = encode("\n\nList of words:")
    return _Draft(
        task="copy",
        pieces=[title + _joined(parts) + encode("\n\n")],
        question=title + _joined(parts[: REPEATED - 1]),
        cue=parts[REPEATED - 1],
        answers=parts[REPEATED:],
        choices=parts[REPEATED:],
    )


def _key_value(encode: Encode, chance: random.Random) -> _Draft:
    """6 keys of two words with a value; two of them again, and a third key is the question, its colon the cue."""
    words = chance.sample(WORDS, 3 * PAIRS)
    keys = [encode(f"\n{a} {b}") for a, b in zip(words[:PAIRS], words[PAIRS:], strict=False)]
    values = [encode(f" {value}") for value in words[2 * PAIRS :]]
    colon, blank = encode(":"), encode("\n\n")
    lines = [key + colon + value for key, value in zip(keys, values, strict=True)]
    *shown, asked = chance.sample(range(PAIRS), SHOWN + 1)
    return _Draft(
        task="key_value",
        pieces=[line + blank for line in lines],
        question=blank + _joined([lines[i] for i in shown]) + keys[asked],
        cue=colon,
        answers=[values[asked]],
        choices=[value for i, value in enumerate(values) if i not in shown],
    )


def _laid_out(draft: _Draft, filler: list[int], context: int, question: int) -> Item:
    """Other text between the pieces, in equal parts, and between the context and the question."""
    room = context - sum(map(len, draft.pieces))
    gap = question - len(draft.question)
    if room < 0 or gap < 0:
        raise ValueError(
            f"an item of {draft.task} lacks {max(-room, -gap)} tokens of {context} and {question}: allow it more"
        )
    part, ids = room // (len(draft.pieces) + 1), []
    for index, piece in enumerate(draft.pieces):
        ids += filler[index * part : (index + 1) * part] + piece
    ids += filler[len(draft.pieces) * part : room + gap] + draft.question + draft.cue
    lead = _common(draft.choices)
    answers = []
    for answer in draft.answers:
        answers.append(len(ids) + lead)
        ids += answer
    return Item(
        task=draft.task,
        ids=ids,
        question_at=context + gap,
        prompt_len=context + question,
        answers=tuple(answers),
        choices=tuple(dict.fromkeys(choice[lead] for choice in draft.choices)),
    )


def _common(parts: Sequence[Sequence[int]]) -> int:
    """How many first tokens all have in common: they tell nothing apart."""
    return next(i for i, ids in enumerate(zip(*parts, strict=False)) if len(set(ids)) > 1)


def _joined(parts: Sequence[list[int]]) -> list[int]:
    return [i for part in parts for i in part]
