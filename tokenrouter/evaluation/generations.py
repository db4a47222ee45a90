"""Texts of one system beside all_high's for the same prompts, both greedy: where they part, how alike, how long."""

import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean
from typing import NamedTuple

from tokenrouter.evaluation.throughput import Throughput

NO_CHRF_NOTE = (
    "chrF is left out: it needs sacrebleu (pip install -c requirements/dev.txt -e '.[chrf]')."
)


class Generation(NamedTuple):
    """What was generated for one prompt: token ids, and the same as text."""

    ids: Sequence[int]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationMatch:
    """One system's texts beside another's.

    Attributes:
        num_texts: of each.
        same_output_frac: share of them that are the same, token by token.
        common_tokens_mean: tokens before the first difference, mean; of a text that is the same all of them.
        length_ratio: its tokens over the other's.
        chrf: chrF2 (Popovic 2015) of all texts together, 0 to 100, the other's as the reference; None: no sacrebleu.
    """

    num_texts: int
    same_output_frac: float
    common_tokens_mean: float
    length_ratio: float
    chrf: float | None


def compare_generations(own: Sequence[Generation], other: Sequence[Generation]) -> GenerationMatch:
    """Compare texts prompt by prompt.

    Args:
        own: a system's.
        other: those of the system that it is compared with, for the same prompts.

    Raises:
        ValueError: no text, or not as many of both.
    """
    if len(own) != len(other) or not own:
        raise ValueError(
            f"{len(own)} and {len(other)} texts cannot be compared: give both systems' for the same prompts"
        )
    pairs = list(zip(own, other, strict=True))
    first = [first_difference(mine.ids, theirs.ids) for mine, theirs in pairs]
    lengths = [len(mine.ids) for mine in own]
    return GenerationMatch(
        num_texts=len(pairs),
        same_output_frac=fmean(index is None for index in first),
        common_tokens_mean=fmean(
            length if index is None else index for index, length in zip(first, lengths, strict=True)
        ),
        length_ratio=sum(lengths) / max(sum(len(theirs.ids) for theirs in other), 1),
        chrf=chrf([mine.text for mine in own], [theirs.text for theirs in other]),
    )


def first_difference(before: Sequence[int], after: Sequence[int]) -> int | None:
    """Index of the first token that differs between two outputs, or where one of them ends; None: they are the same."""
    pairs = enumerate(zip_longest(before, after))
    return next((index for index, (old, new) in pairs if old != new), None)


def chrf(texts: Sequence[str], references: Sequence[str]) -> float | None:
    """chrF2 of all texts together, 0 to 100; None where sacrebleu is not installed.

    Pairs that are both blank have no characters to compare and are left out; 100 where no other is left.
    """
    if not has_sacrebleu():
        return None
    from sacrebleu.metrics.chrf import CHRF

    pairs = zip(texts, references, strict=True)
    shown = [(own, other) for own, other in pairs if own.strip() or other.strip()]
    if not shown:
        return 100.0
    return float(CHRF().corpus_score([t for t, _ in shown], [[r for _, r in shown]]).score)


def has_sacrebleu() -> bool:
    """Whether chrF can be computed."""
    return importlib.util.find_spec("sacrebleu") is not None


def compare_served(
    served: Mapping[str, Throughput],
    decode: Callable[[Sequence[int]], str],
    eos_ids: Collection[int],
) -> dict[str, GenerationMatch]:
    """What every system but all_high generated in its last pass, beside all_high's.

    Requests run on behind an end of text, so that all systems do the same work; here a text ends with it.

    Args:
        served: by system, all_high among them.
        decode: token ids to text.
        eos_ids: tokens that end a text.
    """

    def texts(throughput: Throughput) -> list[Generation]:
        outputs = throughput.repeats[-1].outputs
        parts = [until_end(c.token_ids, eos_ids) for output in outputs for c in output.outputs]
        return [Generation(ids, decode(ids)) for ids in parts]

    found = {name: texts(throughput) for name, throughput in served.items()}
    return {
        name: compare_generations(own, found["all_high"])
        for name, own in found.items()
        if name != "all_high"
    }


def until_end(ids: Sequence[int], eos_ids: Collection[int]) -> list[int]:
    """``ids`` up to the first that ends a text, which is the last one then."""
    end = next((index for index, token in enumerate(ids) if token in eos_ids), len(ids))
    return list(ids[: end + 1])
