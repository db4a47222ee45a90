"""Drawn lengths at drawn times: Poisson and Gamma arrivals, equal requests, a mixture of kinds."""

import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from typing import Literal

from tokenrouter.checks import MOST_SIZE, check_count, check_number, check_size, check_text
from tokenrouter.workloads.base import check_range
from tokenrouter.workloads.prompts import CODE_PROMPTS, DEFAULT_PROMPTS
from tokenrouter.workloads.timed import Shape, TimedWorkload

OPENINGS = {"prompts": DEFAULT_PROMPTS, "code": CODE_PROMPTS, None: ()}


@dataclass(frozen=True, kw_only=True)
class GammaRequests(TimedWorkload):
    """Gaps between arrivals follow a Gamma distribution; lengths are drawn uniformly.

    Lengths depend on the seed alone, so runs of different burstiness serve the same requests.

    Args:
        rate_requests_s: mean number of arrivals per second.
        cv: coefficient of variation of the gaps (standard deviation / mean): 1 is Poisson, above it
            arrivals come in bursts, below it they are more regular.
        prompt_min, prompt_max: tokens of a prompt, both ends included.
        output_min, output_max: tokens of an output, both ends included.

    Raises:
        ValueError: a rate or cv that is no positive number, or an empty range; and as TimedWorkload.
    """

    rate_requests_s: float
    cv: float
    prompt_min: int
    prompt_max: int
    output_min: int
    output_max: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("workload.rate_requests_s", self.rate_requests_s)
        check_size("workload.cv", self.cv)
        check_range("workload.prompt", self.prompt_min, self.prompt_max)
        check_range("workload.output", self.output_min, self.output_max)

    def shapes(self) -> list[Shape]:
        """See TimedWorkload."""
        lengths = random.Random(f"{self.seed} lengths")
        return [
            Shape(
                arrival_s=arrival_s,
                prompt_tokens=lengths.randint(self.prompt_min, self.prompt_max),
                output_tokens=lengths.randint(self.output_min, self.output_max),
                openings=DEFAULT_PROMPTS,
            )
            for arrival_s in gamma_arrivals(
                self.num_requests, self.rate_requests_s, self.cv, seed=self.seed
            )
        ]


@dataclass(frozen=True, kw_only=True)
class PoissonRequests(GammaRequests):
    """Requests that arrive independently of each other: GammaRequests with a cv of 1."""

    cv: float = field(default=1.0, init=False)


@dataclass(frozen=True, kw_only=True)
class UniformRequests(TimedWorkload):
    """Equal requests at equal gaps or all at once: where token-level scheduling cannot pay.

    Args:
        prompt_tokens, output_tokens: of every request.
        gap_s: seconds between arrivals; 0: all at once.

    Raises:
        ValueError: a length below 1, or a gap that is no number of 0 to 1e9; and as TimedWorkload.
    """

    prompt_tokens: int
    output_tokens: int
    gap_s: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("workload.prompt_tokens", self.prompt_tokens, 1)
        check_count("workload.output_tokens", self.output_tokens, 1)
        check_number(
            "workload.gap_s",
            self.gap_s,
            lambda x: 0 <= x <= MOST_SIZE,
            f"of 0 to {MOST_SIZE:g} (seconds)",
        )
        if self.gap_s == 0 and self.rate_scale != 1.0:
            warnings.warn(
                f"workload.rate_scale={self.rate_scale} has no effect: all requests arrive at once; "
                "set workload.gap_s",
                stacklevel=2,
            )

    def shapes(self) -> list[Shape]:
        """See TimedWorkload."""
        return [
            Shape(
                arrival_s=index * self.gap_s,
                prompt_tokens=self.prompt_tokens,
                output_tokens=self.output_tokens,
                openings=DEFAULT_PROMPTS,
            )
            for index in range(self.num_requests)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestKind:
    """One kind of request in a mixture.

    Args:
        name: of the kind, for messages.
        share: its weight among the kinds.
        prompt_min, prompt_max: tokens of a prompt, both ends included.
        output_min, output_max: tokens of an output, both ends included.
        opening: what prompts start with: ``prompts`` (one of our own, in turn), ``code`` (those of
            them that are code), None: the text itself.

    Raises:
        ValueError: a name that is no text, a share that is no positive number, an empty range, or an unknown opening.
    """

    name: str
    share: float
    prompt_min: int
    prompt_max: int
    output_min: int
    output_max: int
    opening: Literal["prompts", "code"] | None = None

    def __post_init__(self) -> None:
        check_text("workload.kinds: name", self.name)
        check_size(f"workload.kinds.{self.name}.share", self.share)
        check_range(f"workload.kinds.{self.name}.prompt", self.prompt_min, self.prompt_max)
        check_range(f"workload.kinds.{self.name}.output", self.output_min, self.output_max)
        if self.opening not in tuple(OPENINGS):
            raise ValueError(
                f"workload.kinds.{self.name}.opening must be prompts, code or null, "
                f"got {self.opening!r}"
            )


@dataclass(frozen=True, kw_only=True)
class SeedMix(TimedWorkload):
    """A mixture of kinds in fixed shares and a drawn order, with Poisson arrivals.

    The number of requests of a kind is its share of ``num_requests``, rounded by largest remainder, so
    that every seed has the same kinds and differs in lengths, order, times and passages.

    Args:
        rate_requests_s: mean number of arrivals per second.
        kinds: at least one.

    Raises:
        ValueError: a rate that is no positive number, or no kinds; and as TimedWorkload.
    """

    rate_requests_s: float
    kinds: Sequence[RequestKind]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("workload.rate_requests_s", self.rate_requests_s)
        are_kinds = isinstance(self.kinds, Sequence) and all(
            isinstance(kind, RequestKind) for kind in self.kinds
        )
        if not are_kinds or not self.kinds:
            raise ValueError(
                "workload.kinds must be a list of kinds of request (RequestKind), each with name, share and lengths, "
                f"as in conf/workload/seed_mix.yaml; got {self.kinds!r}"
            )

    def shapes(self) -> list[Shape]:
        """See TimedWorkload."""
        draw = random.Random(f"{self.seed} kinds")
        counts = quotas([kind.share for kind in self.kinds], self.num_requests)
        kinds = list(chain.from_iterable(map(repeat, self.kinds, counts)))
        draw.shuffle(kinds)
        arrivals = gamma_arrivals(self.num_requests, self.rate_requests_s, 1.0, seed=self.seed)
        return [
            Shape(
                arrival_s=arrival_s,
                prompt_tokens=draw.randint(kind.prompt_min, kind.prompt_max),
                output_tokens=draw.randint(kind.output_min, kind.output_max),
                openings=OPENINGS[kind.opening],
            )
            for arrival_s, kind in zip(arrivals, kinds, strict=True)
        ]


def gamma_arrivals(count: int, rate_requests_s: float, cv: float, *, seed: int) -> list[float]:
    """Arrival times in seconds, the first at 0, with Gamma gaps of mean 1 / rate and the given cv."""
    draw = random.Random(f"{seed} arrivals")
    gaps = (draw.gammavariate(cv**-2, cv**2 / rate_requests_s) for _ in range(count - 1))
    return list(accumulate(gaps, initial=0.0))


def quotas(shares: Sequence[float], count: int) -> list[int]:
    """Whole numbers in proportion to ``shares`` that sum to ``count``, by largest remainder."""
    exact = [count * share / sum(shares) for share in shares]
    whole = [int(value) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: whole[i] - exact[i])
    for index in by_remainder[: count - sum(whole)]:
        whole[index] += 1
    return whole
