"""Windows of text to learn from: cut from the calibration side of texts, so that quality is measured on others.

N tokens of a window.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from tokenrouter.workloads import TextSource, calibration_documents, text_hash

VALID_EVERY = 8
SHORTEST = 4  # a split of at least this part of a window is one window by itself
SEPARATOR = "\n\n"  # between documents, as where quality is measured
Split = Literal["train", "valid"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A request to learn from.

    Attributes:
        text: name of its source.
        split: documents are in one split with all their tokens.
        number: in its source and split.
        ids_N: int64.
        document_N: int64, which document of the source's calibration side each token is from.
        prompt_len: the first so many tokens count as prompt, the others as decoded.
        seed: of what is drawn for it, the prompt's length too.
    """

    text: str
    split: Split
    number: int
    ids_N: Tensor
    document_N: Tensor
    prompt_len: int
    seed: int

    @property
    def name(self) -> str:
        """Unique in a data set."""
        return f"{self.split}-{self.text}-{self.number:05d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The windows of one source.

    Attributes:
        windows: those that were asked for, as far as there are.
        num_missing: windows that the text is too short for.
        hash: of the documents.
    """

    windows: list[Window]
    num_missing: int
    hash: str


def cut_windows(
    source: TextSource,
    encode: Callable[[str], list[int]],
    *,
    window_tokens: int,
    num_tokens: int,
    seed: int,
) -> Cut:
    """Windows of a source's calibration side; every eighth document of it is for validation.

    A longer ``num_tokens`` keeps the windows of a shorter one. Half of the windows are prompts as a whole, the others
    have a prompt of any length, so that both phases are there at all positions.

    Args:
        source: the text.
        encode: text to ids.
        window_tokens: of every window; documents of one split that follow each other share one. A split that is a
            little shorter is one window by itself.
        num_tokens: at least so many, one eighth of the windows for validation.
        seed: of the choice of windows.

    Raises:
        ValueError: fewer than two documents, or one of the splits is shorter than a quarter of a window.
    """
    documents = source.documents()
    kept = calibration_documents(documents)
    if len(kept) < 2:
        raise ValueError(
            f"data {source.name!r}: training and validation need documents of their own, and its calibration side has "
            f"{len(kept)}: choose a text of at least 8 documents"
        )
    num_windows = max(2, math.ceil(num_tokens / window_tokens))
    num_valid = max(1, round(num_windows / VALID_EVERY))
    found: list[Window] = []
    for split, count in (("train", num_windows - num_valid), ("valid", num_valid)):
        is_valid = split == "valid"
        numbers = [n for n in range(len(kept)) if (n % VALID_EVERY == 0) == is_valid]
        ids_N, document_N = _join(kept, numbers, encode)
        if len(ids_N) * SHORTEST < window_tokens:
            raise ValueError(
                f"data {source.name!r}: the {split} side of what is learned from has {len(ids_N)} tokens, and a window "
                f"has {window_tokens}: lower collect.window_tokens or choose a longer text"
            )
        length = min(window_tokens, len(ids_N))
        available = len(ids_N) // length
        for number in _order(available, f"{seed} {source.name} {split}")[:count]:
            own = slice(number * length, (number + 1) * length)
            own_seed = _seed(f"{seed} {source.name} {split} {number}")
            found.append(
                Window(
                    text=source.name,
                    split="valid" if is_valid else "train",
                    number=number,
                    ids_N=ids_N[own],
                    document_N=document_N[own],
                    prompt_len=_prompt_len(length, own_seed),
                    seed=own_seed,
                )
            )
    return Cut(windows=found, num_missing=num_windows - len(found), hash=text_hash(documents))


def unlabelled(cut: Cut, longer: Cut, *, num_tokens: int) -> list[Window]:
    """Windows of the training side beyond those of ``cut``, at least ``num_tokens`` as far as there are.

    Args:
        cut: whose windows are left out.
        longer: of the same source, window length and seed.
        num_tokens: in all.
    """
    names = {window.name for window in cut.windows}
    more = [w for w in longer.windows if w.split == "train" and w.name not in names]
    return [w for i, w in enumerate(more) if i * len(w.ids_N) < num_tokens]


def _join(
    documents: Sequence[str], numbers: Sequence[int], encode: Callable[[str], list[int]]
) -> tuple[Tensor, Tensor]:
    """The ids of some documents side by side, and whose each is."""
    parts = [encode(documents[number] + SEPARATOR) for number in numbers]
    lengths = torch.tensor([len(part) for part in parts])
    ids_N = torch.tensor(list(chain.from_iterable(parts)), dtype=torch.int64)
    return ids_N, torch.tensor(numbers).repeat_interleave(lengths)


def _order(count: int, text: str) -> list[int]:
    """0 .. count-1, shuffled."""
    generator = torch.Generator().manual_seed(_seed(text))
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order


def _prompt_len(num_tokens: int, seed: int) -> int:
    half, rest = seed % 2, seed // 2
    return num_tokens if half else 1 + rest % num_tokens


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def texts_by_name(texts: Mapping[str, TextSource], names: Sequence[str]) -> list[TextSource]:
    """The sources called ``names``.

    Raises:
        ValueError: no names, one twice, or one that is not there; the message lists those that are.
    """
    if not names or len(set(names)) != len(names):
        raise ValueError(
            f"collect.sources={list(names)} must name at least one text, and each once; texts: {', '.join(texts)}"
        )
    if unknown := [name for name in names if name not in texts]:
        raise ValueError(
            f"collect.sources: no text {', '.join(map(repr, unknown))}; texts: {', '.join(texts)}. Add one of "
            f"conf/data with +data@collect.texts.{unknown[0]}=<its config>"
        )
    return [texts[name] for name in names]
