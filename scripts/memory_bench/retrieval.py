"""Synthetic tasks whose answer stands far back in the context: copying a list of words, and values by their keys."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Encode = Callable[[str], list[int]]

WORDS = """apple river table window garden mountain paper music winter summer bridge letter doctor teacher market
kitchen island forest engine silver golden yellow purple orange horse tiger rabbit monkey chicken turtle spider
butter cheese bread sugar coffee water bottle basket pocket jacket shirt button needle thread carpet mirror candle
hammer ladder bucket shovel anchor castle tower palace temple church school office station airport harbor village
city country desert valley ocean beach storm thunder rain snow cloud shadow light morning evening night spring autumn
farmer soldier sailor captain king queen prince writer painter singer dancer driver pilot baker brother sister
mother father cousin friend neighbor stranger giant dragon robot rocket planet moon star comet guitar piano violin
drum trumpet pencil notebook camera phone radio clock calendar""".split()

COPIED, SHOWN = 48, 8
PAIRS, ASKED = 30, 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A context with several answers, teacher-forced.

    Attributes:
        task: copy or key_value.
        ids: of the context with its answers.
        prompt_len: so many are the prompt; the others are fed one by one.
        answers: first and end position of each answer's tokens in ``ids``.
    """

    task: str
    ids: list[int]
    prompt_len: int
    answers: tuple[tuple[int, int], ...]


def copy_item(encode: Encode, filler_ids: Sequence[int], seed: int) -> Item:
    """48 words, the filler, the first 8 words again; the other 40 are the answers."""
    words = random.Random(seed).sample(WORDS, COPIED)
    parts = [encode(f" {word}") for word in words]
    title = encode("\n\nList of words:")
    ids = (
        title + _joined(parts) + encode("\n\n") + list(filler_ids) + title + _joined(parts[:SHOWN])
    )
    return _with_answers("copy", ids, [([], part) for part in parts[SHOWN:]])


def key_value_item(encode: Encode, filler_ids: Sequence[int], seed: int) -> Item:
    """30 lines of a key and a value, the filler, then 15 of the keys, each followed by its value, the answer."""
    chance = random.Random(seed)
    words = chance.sample(WORDS, 2 * PAIRS)
    keys = [encode(f"\n{key}:") for key in words[:PAIRS]]
    values = [encode(f" {value}") for value in words[PAIRS:]]
    title = encode("\n\nKeys and values:")
    lines = [key + value for key, value in zip(keys, values, strict=True)]
    ids = title + _joined(lines) + encode("\n\n") + list(filler_ids) + title
    asked = chance.sample(range(PAIRS), ASKED)
    return _with_answers("key_value", ids, [(keys[i], values[i]) for i in asked])


def solved(item: Item, is_right_N: Sequence[bool]) -> list[bool]:
    """Per answer whether all of its tokens were predicted; entry p of ``is_right_N``: token p was."""
    return [all(is_right_N[start:stop]) for start, stop in item.answers]


def _with_answers(task: str, ids: list[int], asked: list[tuple[list[int], list[int]]]) -> Item:
    """The prompt ends where the first answer begins."""
    prompt_len = len(ids) + len(asked[0][0])
    answers = []
    for question, answer in asked:
        ids = ids + question + answer
        answers.append((len(ids) - len(answer), len(ids)))
    return Item(task=task, ids=ids, prompt_len=prompt_len, answers=tuple(answers))


def _joined(parts: Sequence[list[int]]) -> list[int]:
    return [i for part in parts for i in part]
