"""Synthetic tasks whose answer stands far back in the context: copying a list, values by their keys, a pass key.

An item is a context, in which what is asked for stands among other text, and a question. The answers come behind it:
for teacher forcing, where each is a choice among the item's own by their first tokens' logits, or to be generated.
Passkey: Mohtashami and Jaggi 2023. Depth: where in the context it stands (Kamradt 2023, needle in a haystack).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

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
NUMBERS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A context, a question and its answers.

    Attributes:
        task: one of ``TASKS``.
        ids: all of it.
        question_at: where the question begins.
        prompt_len: where it ends but for its cue; for teacher forcing, the others are fed one by one.
        answer_at: where the cue ends and the answers begin, which are the rest.
        answers: positions of the answers in ``ids`` (of their first tokens in which choices differ), each at least two
            tokens behind the question's end: the token that predicts it is read when the question has been.
        choices: token ids that an answer is chosen among.
    """

    task: str
    ids: list[int]
    question_at: int
    prompt_len: int
    answer_at: int
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
            answer_at=self.answer_at - first,
            answers=tuple(answer - first for answer in self.answers),
        )


def make_items(
    encode: Encode, text_ids: Sequence[int], count: int, *, context: int, question: int
) -> list[Item]:
    """Items of copy and key_value, each with another part of the text as its filler.

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


def place_item(
    task: str,
    encode: Encode,
    text_ids: Sequence[int],
    *,
    length: int,
    depth_frac: float,
    seed: str,
) -> Item:
    """One item whose prompt, cue included, has exactly ``length`` tokens.

    Args:
        task: one of ``TASKS``.
        encode: text to token ids.
        text_ids: of the other text; it starts again where it is too short.
        length: tokens before the answers.
        depth_frac: where in the context what is asked for stands: 0 at its beginning, 1 before the question.
        seed: with the arguments before, of what is asked for and of the other text.

    Raises:
        ValueError: the item does not fit.
    """
    chance = random.Random(f"{seed} {task} {length} {depth_frac}")
    start = chance.randrange(len(text_ids))
    filler = list(islice(cycle(text_ids), start, start + length))
    draft = TASKS[task](encode, chance)
    question = len(draft.question)
    return _laid_out(draft, filler, length - question - len(draft.cue), question, depth_frac)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Draft:
    """What an item says, in token ids: ``pieces`` stand apart in the context, ``cue`` comes before the answers.

    ``asked`` is the index of the piece that holds the answers.
    """

    task: str
    pieces: list[list[int]]
    question: list[int]
    cue: list[int]
    answers: list[list[int]]
    choices: list[list[int]]
    asked: int = 0


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
        asked=asked,
        question=blank + _joined([lines[i] for i in shown]) + keys[asked],
        cue=colon,
        answers=[values[asked]],
        choices=[value for i, value in enumerate(values) if i not in shown],
    )


def _passkey(encode: Encode, chance: random.Random) -> _Draft:
    """A number of 5 digits, said twice in one place; the choices are 10 numbers."""
    key, *others = chance.sample(range(10_000, 100_000), NUMBERS)
    numbers = [encode(f" {number}") for number in (key, *others)]
    return _Draft(
        task="passkey",
        pieces=[encode(f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n")],
        question=encode("\n\nWhat is the pass key? The pass key"),
        cue=encode(" is"),
        answers=[numbers[0]],
        choices=numbers,
    )


TASKS: dict[str, Callable[[Encode, random.Random], _Draft]] = {
    "passkey": _passkey,
    "key_value": _key_value,
    "copy": _copy,
}
"""What can be asked, by name."""


def _laid_out(
    draft: _Draft,
    filler: list[int],
    context: int,
    question: int,
    depth_frac: float | None = None,
) -> Item:
    """Other text between the pieces, in equal parts but for the one at a depth, and before the question."""
    room = context - sum(map(len, draft.pieces))
    gap = question - len(draft.question)
    if room < 0 or gap < 0:
        raise ValueError(
            f"an item of {draft.task} lacks {max(-room, -gap)} tokens of {context} and {question}: allow it more"
        )
    ids: list[int] = []
    read = 0
    for before, piece in _places(draft, room, depth_frac):
        ids += filler[read:before] + piece
        read = before
    ids += filler[read : room + gap] + draft.question + draft.cue
    answer_at = len(ids)
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
        answer_at=answer_at,
        answers=tuple(answers),
        choices=tuple(dict.fromkeys(choice[lead] for choice in draft.choices)),
    )


def _places(draft: _Draft, room: int, depth_frac: float | None) -> list[tuple[int, list[int]]]:
    """In order, every piece with the tokens of other text before it; the asked one at its depth, if there is one."""
    others = [
        piece
        for index, piece in enumerate(draft.pieces)
        if depth_frac is None or index != draft.asked
    ]
    part = room // (len(others) + 1)
    places = [((index + 1) * part, piece) for index, piece in enumerate(others)]
    if depth_frac is not None:
        places.append((round(depth_frac * room), draft.pieces[draft.asked]))
    return sorted(places, key=lambda place: place[0])


def _common(parts: Sequence[Sequence[int]]) -> int:
    """How many first tokens all have in common: they tell nothing apart."""
    return next(i for i, ids in enumerate(zip(*parts, strict=False)) if len(set(ids)) > 1)


def _joined(parts: Sequence[list[int]]) -> list[int]:
    return [i for part in parts for i in part]
