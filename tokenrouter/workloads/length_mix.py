"""Requests with prompt lengths that are listed one by one."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tokenrouter.checks import check_count, check_integer, check_size
from tokenrouter.workloads.base import (
    Encode,
    RequestSet,
    RequestSpec,
    Workload,
    check_priorities,
    check_range,
    deal,
    greedy,
)
from tokenrouter.workloads.prompts import DEFAULT_PROMPTS


@dataclass(frozen=True, kw_only=True)
class LengthMix(Workload):
    """Greedy requests of given prompt and random output lengths, without EOS, all at once.

    A prompt is one of our own prompts followed by a passage of the text, cut to length. So short
    prompts differ in kind (prose, code, numbers, languages) and long ones are mostly text. Lengths
    that are listed are scaled, and never clipped: the engine refuses those that the model cannot take.

    Args:
        prompt_lengths: tokens per prompt, one request each.
        output_min, output_max: outputs are drawn uniformly from this range, both ends included.
        length_scale: prompt and output lengths are multiplied by it and rounded, to 1 token at least.
        seed: of that draw, of the passages and of the order of priorities.
        priorities: of the requests, dealt in equal parts; None: all have 0.

    Raises:
        ValueError: no lengths, one that is no count of at least 1, a range of outputs that is empty, a scale
            that is no positive number, or a seed or priority that is no integer.
    """

    prompt_lengths: Sequence[int]
    output_min: int
    output_max: int
    length_scale: float = 1.0
    seed: int = 0
    priorities: Sequence[int] | None = None

    def __post_init__(self) -> None:
        lengths = self.prompt_lengths
        if not isinstance(lengths, Sequence) or isinstance(lengths, str) or not lengths:
            raise ValueError(
                f"workload.prompt_lengths must be a list of lengths, such as [20, 200], got {lengths!r}"
            )
        for length in lengths:
            check_count("a length in workload.prompt_lengths", length, 1)
        check_range("workload.output", self.output_min, self.output_max)
        check_size("workload.length_scale", self.length_scale)
        check_integer("workload.seed", self.seed)
        check_priorities(self.priorities)

    def build(
        self, encode: Encode, text_ids: Sequence[int], *, max_model_len: int | None = None
    ) -> RequestSet:
        """See Workload.

        Raises:
            ValueError: the text is shorter than the longest prompt.
        """
        lengths = [self._scaled(length) for length in self.prompt_lengths]
        longest = max(lengths)
        if len(text_ids) < longest:
            raise ValueError(
                f"a prompt of {longest} tokens needs a longer text; this one has {len(text_ids)}: "
                "choose another with data=..., or shorter workload.prompt_lengths"
            )
        draw = random.Random(self.seed)
        specs = []
        priorities = deal(self.priorities, len(lengths), seed=self.seed)
        for index, (length, priority) in enumerate(zip(lengths, priorities, strict=True)):
            start = draw.randrange(len(text_ids) - length + 1)
            opening = encode(DEFAULT_PROMPTS[index % len(DEFAULT_PROMPTS)])
            prompt_ids = (*opening, *text_ids[start : start + length])[:length]
            params = greedy(self._scaled(draw.randint(self.output_min, self.output_max)))
            specs.append(RequestSpec(prompt_ids=prompt_ids, params=params, priority=priority))
        return RequestSet(requests=tuple(specs))

    def _scaled(self, length: int) -> int:
        return max(1, round(self.length_scale * length))
