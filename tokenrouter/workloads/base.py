"""The contract of a workload: the requests that every system of a comparison serves."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenrouter.checks import MOST_SIZE, check_count, check_integer, check_number
from tokenrouter.sampling_params import SamplingParams

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSpec:
    """One request of a workload.

    Attributes:
        prompt_ids: the prompt's token ids.
        params: how to sample.
        arrival_s: when it arrives, in seconds after the start, 0 to 1e9.
        priority: lower goes first, with the scheduler ``priority``.

    Raises:
        ValueError: ``arrival_s`` is no such number, or ``priority`` no integer.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float = 0.0
    priority: int = 0

    def __post_init__(self) -> None:
        check_number(
            "arrival_s",
            self.arrival_s,
            lambda x: 0 <= x <= MOST_SIZE,
            f"of 0 to {MOST_SIZE:g} (seconds after the start)",
        )
        check_integer("priority", self.priority)

    @property
    def max_output_tokens(self) -> int:
        """The most tokens that it generates; exactly so many where EOS is ignored."""
        return self.params.max_tokens or 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSet:
    """The requests of a workload, and what was changed to make them fit.

    Attributes:
        requests: in the order of their arrival.
        clipped_requests: how many have fewer tokens than the workload asked for.
        clipped_prompt_tokens, clipped_output_tokens: tokens that were cut, over all requests.
        wrapped_requests: how many needed a passage longer than the text, which then starts again.
    """

    requests: tuple[RequestSpec, ...]
    clipped_requests: int = 0
    clipped_prompt_tokens: int = 0
    clipped_output_tokens: int = 0
    wrapped_requests: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(len(r.prompt_ids) for r in self.requests)

    @property
    def output_tokens(self) -> int:
        """Tokens that all requests generate."""
        return sum(r.max_output_tokens for r in self.requests)

    @property
    def arrival_span_s(self) -> float:
        """Seconds between the first arrival and the last; 0 where all arrive at once."""
        arrivals = [r.arrival_s for r in self.requests]
        return max(arrivals) - min(arrivals)

    @property
    def is_uniform(self) -> bool:
        """Whether all have the same prompt and output length and arrive at once."""
        shapes = {(len(r.prompt_ids), r.max_output_tokens) for r in self.requests}
        return len(shapes) == 1 and self.arrival_span_s == 0.0


class Workload(ABC):
    """Makes requests out of lengths, arrival times and a text. ``conf/workload`` has one config each.

    All requests are greedy and ignore EOS, so that every system does the same work. The same options,
    text and model length give the same requests.
    """

    @abstractmethod
    def build(
        self, encode: Encode, text_ids: Sequence[int], *, max_model_len: int | None = None
    ) -> RequestSet:
        """Build the requests, in the order of their arrival; the first arrives at 0.

        Args:
            encode: text to token ids, without special tokens.
            text_ids: the ids of the text that prompts are cut from.
            max_model_len: the most tokens of a request, prompt and output; None: any.

        Raises:
            ValueError: the text does not do, or a file that the lengths come from is missing or
                broken.
        """

    def requests(self, encode: Encode, text_ids: Sequence[int]) -> list[RequestSpec]:
        """The requests of ``build`` without a limit to their length; arguments and errors as there."""
        return list(self.build(encode, text_ids).requests)

    def check(self) -> None:
        """Refuse at once, before a model is loaded, what ``build`` would refuse.

        Raises:
            ValueError: a file that the lengths come from is missing or broken, or a request arrives too late.
        """


def greedy(max_tokens: int) -> SamplingParams:
    """Exactly ``max_tokens`` tokens, the most likely one each time."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def check_range(name: str, low: object, high: object) -> None:
    """Refuse a range of tokens that is empty; raises ValueError.

    Args:
        name: of the options, without ``_min`` and ``_max``.
        low: the lower end, a count of at least 1.
        high: the other, at least ``low``.
    """
    check_count(f"{name}_min", low, 1)
    check_count(f"{name}_max", high, 1)
    if low > high:  # type: ignore[operator]
        raise ValueError(f"{name}_min={low} must be at most {name}_max={high}")


def check_priorities(priorities: object) -> None:
    """Refuse what is neither None nor a list of integers; raises ValueError."""
    if priorities is None:
        return
    if not isinstance(priorities, Sequence) or isinstance(priorities, str) or not priorities:
        raise ValueError(
            f"workload.priorities must be a list of integers, such as [0, 1], or null, got {priorities!r}"
        )
    for priority in priorities:
        check_integer("a number in workload.priorities", priority)


def deal(priorities: Sequence[int] | None, count: int, *, seed: int) -> list[int]:
    """A priority for each of ``count`` requests: all of them in equal parts, in a drawn order; None: 0 for all."""
    given = priorities or (0,)
    dealt = [given[index % len(given)] for index in range(count)]
    random.Random(f"{seed} priorities").shuffle(dealt)
    return dealt
