"""What the engine hands back. Plain values; names follow vLLM's RequestOutput and CompletionOutput."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprob:
    """Log-probability of one candidate token (natural log), its 1-based rank and its text."""

    logprob: float
    rank: int
    decoded_token: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetrics:
    """Times of one request in seconds on the engine's clock (``time.perf_counter`` unless a virtual one is set).

    ``queue_s`` is the time in which the request could not run: before admission, after preemption, and while its token
    waited in a route's queue. ``token_times_s`` has one entry per generated token.
    """

    arrival_s: float
    first_scheduled_s: float
    first_token_s: float
    finished_s: float
    queue_s: float
    token_times_s: tuple[float, ...]
    num_preemptions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One of a request's ``n`` completions.

    Attributes:
        index: 0 .. n-1.
        text: all text so far; final when ``finish_reason`` is set.
        delta: the text added since the last output of this completion (streaming).
        token_ids: all generated ids so far, a stop token included.
        cumulative_logprob: sum of the sampled tokens' log-probabilities, when ``logprobs`` was asked for.
        logprobs: per generated token, candidate id -> Logprob, when asked for.
        routes: executed route index per token of prompt + completion (-1 for the last token, which was never fed).
        finish_reason: None while running.
        stop_reason: the stop string or stop token id that ended it, None for EOS and length.
    """

    index: int
    text: str
    delta: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    routes: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """The state of a request after a step; ``finished`` when all its completions are.

    ``error`` holds the message when the request was refused or failed; its outputs are then empty or partial.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
