"""Workloads whose requests arrive over time: lengths and arrivals first, then text."""

import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenrouter.checks import MOST_SIZE, check_count, check_integer, check_size
from tokenrouter.workloads.base import (
    Encode,
    RequestSet,
    RequestSpec,
    Workload,
    check_priorities,
    deal,
    greedy,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a workload asks of one request, before scales and limits.

    Attributes:
        arrival_s: seconds on any clock; the first request's time becomes 0.
        prompt_tokens, output_tokens: lengths.
        openings: prompts start with one of these in turn; empty: with the text itself.
        block_ids: of a trace with shared prefixes: equal ids stand for equal blocks of the prompt.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    openings: Sequence[str] = ()
    block_ids: tuple[int, ...] = ()


class Lengths(NamedTuple):
    """Tokens of one request."""

    prompt: int
    output: int


@dataclass(frozen=True, kw_only=True)
class TimedWorkload(Workload):
    """Base of traces and of synthetic arrivals.

    Lengths are scaled, then clipped: the output to ``max_output_tokens``, the prompt to
    ``max_prompt_tokens`` and to what the model's length leaves beside the output. A clipped prompt
    loses its end, so that shared prefixes stay shared. A passage that is longer than the text goes on
    at the text's start.

    Args:
        num_requests: so many.
        rate_scale: requests arrive so many times as fast: arrival times are divided by it.
        length_scale: prompt and output lengths are multiplied by it and rounded, to 1 token at least:
            long requests for a small model. Clipped tokens are counted after it.
        max_prompt_tokens, max_output_tokens: longer ones are clipped; None: no limit of its own.
        seed: of everything that is drawn.
        priorities: of the requests, dealt in equal parts; None: all have 0.

    Raises:
        ValueError: a number of requests or a limit that is no count, a scale that is no positive number, or a seed or
            priority that is no integer.
    """

    num_requests: int
    rate_scale: float = 1.0
    length_scale: float = 1.0
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    seed: int = 0
    priorities: Sequence[int] | None = None

    def __post_init__(self) -> None:
        check_count("workload.num_requests", self.num_requests, 1)
        for name in ("max_prompt_tokens", "max_output_tokens"):
            if getattr(self, name) is not None:
                check_count(f"workload.{name}", getattr(self, name), 1)
        for name in ("rate_scale", "length_scale"):
            check_size(f"workload.{name}", getattr(self, name))
        check_integer("workload.seed", self.seed)
        check_priorities(self.priorities)

    def check(self) -> None:
        """See Workload."""
        self._arrivals_s(self.shapes())

    @abstractmethod
    def shapes(self) -> list[Shape]:
        """Lengths and arrivals of ``num_requests`` requests, in the order of arrival, unscaled.

        Raises:
            ValueError: a trace is missing, broken or too short.
        """

    def build(
        self, encode: Encode, text_ids: Sequence[int], *, max_model_len: int | None = None
    ) -> RequestSet:
        """See Workload."""
        if not text_ids:
            raise ValueError(
                "the text has no tokens to cut prompts from: choose another with data=..."
            )
        shapes = self.shapes()
        asked = [self._scaled(shape) for shape in shapes]
        clipped = [self._clipped(lengths, max_model_len) for lengths in asked]
        priorities = deal(self.priorities, len(shapes), seed=self.seed)
        specs = [
            RequestSpec(
                prompt_ids=tuple(self._prompt(index, shape, lengths.prompt, encode, text_ids)),
                params=greedy(lengths.output),
                arrival_s=arrival_s,
                priority=priority,
            )
            for index, (shape, lengths, arrival_s, priority) in enumerate(
                zip(shapes, clipped, self._arrivals_s(shapes), priorities, strict=True)
            )
        ]
        return RequestSet(
            requests=tuple(specs),
            clipped_requests=sum(a != b for a, b in zip(asked, clipped, strict=True)),
            clipped_prompt_tokens=sum(a.prompt for a in asked) - sum(c.prompt for c in clipped),
            clipped_output_tokens=sum(a.output for a in asked) - sum(c.output for c in clipped),
            wrapped_requests=sum(self._longest_passage(c.prompt) > len(text_ids) for c in clipped),
        )

    def _arrivals_s(self, shapes: Sequence[Shape]) -> list[float]:
        """Of each request, from the first one on; raises ValueError where the last comes too late."""
        arrivals = [(shape.arrival_s - shapes[0].arrival_s) / self.rate_scale for shape in shapes]
        if arrivals[-1] > MOST_SIZE:
            raise ValueError(
                f"the last request would arrive after {arrivals[-1]:g} s, and {MOST_SIZE:g} is the most: raise "
                f"workload.rate_scale={self.rate_scale}, or let requests follow sooner"
            )
        return arrivals

    def _scaled(self, shape: Shape) -> Lengths:
        return Lengths(
            max(1, round(self.length_scale * shape.prompt_tokens)),
            max(1, round(self.length_scale * shape.output_tokens)),
        )

    def _clipped(self, lengths: Lengths, max_model_len: int | None) -> Lengths:
        prompt, output = lengths
        if self.max_output_tokens is not None:
            output = min(output, self.max_output_tokens)
        if self.max_prompt_tokens is not None:
            prompt = min(prompt, self.max_prompt_tokens)
        if max_model_len is not None:
            output = min(output, max_model_len - 1)
            prompt = min(prompt, max_model_len - output)
        return Lengths(prompt, output)

    def _prompt(
        self, index: int, shape: Shape, length: int, encode: Encode, text_ids: Sequence[int]
    ) -> list[int]:
        """``length`` token ids of request ``index``: its opening, then a passage from a seeded place."""
        draw = random.Random(f"{self.seed} prompt {index}")
        text = passage(text_ids, draw.randrange(num_places(text_ids, length)), length)
        opening = encode(shape.openings[index % len(shape.openings)]) if shape.openings else []
        return [*opening, *text][:length]

    def _longest_passage(self, prompt_tokens: int) -> int:
        """The longest passage that a prompt of so many tokens takes from the text in one piece."""
        return prompt_tokens


def num_places(text_ids: Sequence[int], length: int) -> int:
    """Where a passage of ``length`` ids may start: so that it ends in the text, if the text is long enough."""
    return len(text_ids) - length + 1 if len(text_ids) >= length else len(text_ids)


def passage(text_ids: Sequence[int], start: int, length: int) -> list[int]:
    """``length`` ids from ``start`` on; at its end the text starts again."""
    return [text_ids[(start + i) % len(text_ids)] for i in range(length)]
