"""Mooncake's traces, which say what prompts have in common (Qin et al. 2024, arXiv:2407.00079)."""

import json
import math
import random
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenrouter.checks import check_count, check_integer, check_number
from tokenrouter.workloads.base import Encode
from tokenrouter.workloads.timed import Shape, num_places, passage
from tokenrouter.workloads.traces import TraceWorkload, at_line

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
MOST_MS = 1e15
BLOCK_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class MooncakeTrace(TraceWorkload):
    """A JSONL file with timestamp (ms), input_length, output_length and hash_ids.

    An id stands for 512 tokens and all that precedes them, so prompts with equal first ids have equal
    first blocks. Here an id's block is a passage of the text: equal ids give equal tokens in every
    request, and other ids begin at another place (as long as the text has places enough).
    ``length_scale`` scales the blocks too (rounded up): shared prefixes keep their share of the prompt.
    """

    def _read(self, path: Path, text: str) -> list[Shape]:
        found: list[Shape] = []
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                with at_line(path, number):
                    found.append(_shape(line))
        return found

    def _prompt(
        self, index: int, shape: Shape, length: int, encode: Encode, text_ids: Sequence[int]
    ) -> list[int]:
        block_tokens = self._block_tokens
        places = num_places(text_ids, block_tokens)
        draw = random.Random(f"{self.seed} blocks")
        first, stride = draw.randrange(places), draw.randrange(places)
        while math.gcd(stride, places) > 1:
            stride += 1
        ids: list[int] = []
        for block_id in shape.block_ids[: math.ceil(length / block_tokens)]:
            ids += passage(text_ids, (first + stride * block_id) % places, block_tokens)
        return ids[:length]

    def _longest_passage(self, prompt_tokens: int) -> int:
        return self._block_tokens

    @property
    def _block_tokens(self) -> int:
        return math.ceil(BLOCK_TOKENS * self.length_scale)


def _shape(line: str) -> Shape:
    """The request of one line; raises ValueError where it is none."""
    row: Any = json.loads(line)
    known = row if isinstance(row, dict) else {}
    if lacking := [name for name in FIELDS if name not in known]:
        raise ValueError(f"a request needs {', '.join(FIELDS)}, and has no {', '.join(lacking)}")
    check_number(
        "timestamp",
        row["timestamp"],
        lambda x: abs(x) <= MOST_MS,
        f"of at most {MOST_MS:g} (milliseconds)",
    )
    for name in ("input_length", "output_length"):
        check_count(name, row[name], 1)
    return Shape(
        arrival_s=row["timestamp"] / 1e3,
        prompt_tokens=row["input_length"],
        output_tokens=row["output_length"],
        block_ids=_block_ids(row["hash_ids"], row["input_length"]),
    )


def _block_ids(ids: object, length: int) -> tuple[int, ...]:
    if not isinstance(ids, list):
        raise ValueError(f"hash_ids must be a list of integers, got {reprlib.repr(ids)}")
    for block_id in ids:
        check_integer("a number in hash_ids", block_id)
    if len(ids) * BLOCK_TOKENS < length:
        raise ValueError(f"{len(ids)} hash_ids are too few blocks for {length} tokens")
    return tuple(ids)
