"""Requests with controlled prompt and output lengths: every system does the same work."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenrouter.sampling_params import SamplingParams
from tokenrouter.workloads.prompts import DEFAULT_PROMPTS


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSpec:
    """One request of a workload.

    Attributes:
        prompt_ids: the prompt's token ids.
        params: how to sample.
        arrival_s: when it arrives, in seconds after the start.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthMix:
    """Greedy requests of given prompt and random output lengths, without EOS, all at once.

    A prompt is one of our own prompts followed by a passage of the text, cut to length. So short
    prompts differ in kind (prose, code, numbers, languages) and long ones are mostly text.

    Args:
        prompt_lengths: tokens per prompt, one request each.
        output_min, output_max: outputs are drawn uniformly from this range, both ends included.
        seed: of that draw and of the passages.

    Raises:
        ValueError: no lengths, a length below 1, or a range of outputs that is empty.
    """

    prompt_lengths: Sequence[int]
    output_min: int
    output_max: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.prompt_lengths or min(self.prompt_lengths) < 1:
            raise ValueError(
                "workload.prompt_lengths needs lengths of at least 1, "
                f"got {list(self.prompt_lengths)}"
            )
        if not 1 <= self.output_min <= self.output_max:
            raise ValueError(
                "workload needs 1 <= output_min <= output_max, "
                f"got output_min={self.output_min} and output_max={self.output_max}"
            )

    def requests(
        self, encode: Callable[[str], list[int]], text_ids: Sequence[int]
    ) -> list[RequestSpec]:
        """Build the requests.

        Args:
            encode: text to token ids, without special tokens.
            text_ids: the ids of a text, at least as long as the longest prompt.

        Raises:
            ValueError: the text is shorter than the longest prompt.
        """
        longest = max(self.prompt_lengths)
        if len(text_ids) < longest:
            raise ValueError(
                f"a prompt of {longest} tokens needs a longer text; this one has {len(text_ids)}: "
                "choose another with data=..., or shorter workload.prompt_lengths"
            )
        draw = random.Random(self.seed)
        specs = []
        for index, length in enumerate(self.prompt_lengths):
            start = draw.randrange(len(text_ids) - length + 1)
            opening = encode(DEFAULT_PROMPTS[index % len(DEFAULT_PROMPTS)])
            prompt_ids = (*opening, *text_ids[start : start + length])[:length]
            max_tokens = draw.randint(self.output_min, self.output_max)
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            specs.append(RequestSpec(prompt_ids=prompt_ids, params=params))
        return specs
