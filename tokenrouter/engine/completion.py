"""One completion from its first token to its output, and the group of completions that a request asked for."""

import math
from dataclasses import dataclass, field

import numpy as np

from tokenrouter.engine.detokenizer import IncrementalDetokenizer
from tokenrouter.engine.sampler import check_stop
from tokenrouter.engine.sampling_rows import SamplerState
from tokenrouter.engine.step import IntArray
from tokenrouter.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from tokenrouter.scheduler import UNDECIDED, Request

LogprobEntry = dict[int, Logprob]


@dataclass(slots=True, eq=False)
class Completion:
    """One of a prompt's completions.

    Attributes:
        request: what the scheduler sees of it.
        state: what the sampler keeps for it.
        detokenizer: None: no text is wanted, or there is no tokenizer.
        logprobs: one entry per generated token; None: not asked for.
        num_detokenized: so many of the generated tokens went to the detokenizer.
        finish_reason: None while it runs; ``stop_reason`` is the token or string that ended it.
        finished_s: when it ended, NaN before.
    """

    request: Request
    state: SamplerState
    detokenizer: IncrementalDetokenizer | None
    logprobs: list[LogprobEntry] | None
    num_detokenized: int = 0
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    finished_s: float = math.nan

    @property
    def looks_at_tokens(self) -> bool:
        """Whether each token matters to it before the end."""
        wants = self.logprobs is not None or self.state.counts is not None
        return wants or bool(self.request.params.stop_strings)

    @property
    def num_output(self) -> int:
        """Tokens that were drawn; those that were given do not count."""
        request = self.request
        return 0 if request.forced_ids is not None else request.num_tokens - request.prompt_len

    def output_ids(self, start: int = 0) -> list[int]:
        """The drawn tokens from number ``start`` on."""
        first = self.request.prompt_len
        ids: list[int] = self.request.history.ids[first + start : first + self.num_output].tolist()
        return ids

    def take(
        self, token_id: int, logprobs: LogprobEntry | None, eos_token_ids: frozenset[int]
    ) -> None:
        """Sees whether the token that was appended last ends the completion."""
        request = self.request
        self.state.advance(token_id)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token_id].logprob
        room = request.max_total - request.prompt_len
        stop = check_stop(request.params, token_id, self.num_output, eos_token_ids, room)
        if stop is not None:
            self.finish_reason, self.stop_reason = stop
        if request.params.stop_strings and self.detokenizer is not None:
            self._detokenize(self.detokenizer)
            if self.detokenizer.stop_hit is not None:
                self.finish_reason, self.stop_reason = "stop", self.detokenizer.stop_hit

    def output(self, executed_of: IntArray) -> CompletionOutput:
        """Its state for the user; ``executed_of`` maps requested to executed routes."""
        text, delta = self._text()
        ended = self.finish_reason is not None
        wants_logprobs = self.logprobs is not None
        return CompletionOutput(
            index=self.request.index,
            text=text,
            delta=delta,
            token_ids=tuple(self.output_ids()),
            cumulative_logprob=self.cumulative_logprob if wants_logprobs else None,
            logprobs=list(self.logprobs) if self.logprobs is not None else None,
            routes=self._routes(executed_of) if ended else (),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            metrics=self._metrics() if ended else None,
        )

    def _text(self) -> tuple[str, str]:
        """All text and what is new; at the end, what was held back may complete a stop string."""
        detokenizer = self.detokenizer
        if detokenizer is None:
            return "", ""
        self._detokenize(detokenizer)
        if self.finish_reason is not None:
            reason = detokenizer.finish(self.finish_reason)
            if self.finish_reason != "abort":
                self.finish_reason = reason
                self.stop_reason = detokenizer.stop_hit or self.stop_reason
        delta = detokenizer.take_delta()
        return detokenizer.text, delta

    def _detokenize(self, detokenizer: IncrementalDetokenizer) -> None:
        """Feeds what the detokenizer has not seen: every step for streams and stop strings, else once at the end."""
        for token in self.output_ids(self.num_detokenized):
            detokenizer.append(token)
        self.num_detokenized = self.num_output

    def _routes(self, executed_of: IntArray) -> tuple[int, ...]:
        """The executed route per token, -1 where it never ran (the last one never does)."""
        request = self.request
        requested_N = request.requested_N[: request.num_tokens].copy()
        requested_N[request.num_run :] = UNDECIDED
        executed_N = np.where(requested_N < 0, -1, executed_of[requested_N])
        return tuple(executed_N.tolist())

    def _metrics(self) -> RequestMetrics:
        request = self.request
        times = request.times_N[~np.isnan(request.times_N)].tolist()
        return RequestMetrics(
            arrival_s=request.arrival_s,
            first_scheduled_s=request.first_scheduled_s,
            first_token_s=times[0] if times else math.nan,
            finished_s=self.finished_s,
            queue_s=request.queue_s,
            token_times_s=tuple(times),
            num_preemptions=request.num_preemptions,
        )


@dataclass(slots=True, eq=False)
class RequestGroup:
    """A request as its user knows it: one prompt and its ``n`` completions.

    Attributes:
        prompt: the text, None where it came as ids.
        stream: its state is handed back after every token, not only at the end.
        prompt_logprobs: by position; None: not asked for.
    """

    request_id: str
    prompt: str | None
    prompt_ids: tuple[int, ...]
    stream: bool
    completions: list[Completion] = field(default_factory=list)
    prompt_logprobs: dict[int, LogprobEntry] | None = None

    @property
    def finished(self) -> bool:
        """Whether all completions are."""
        return all(c.finish_reason is not None for c in self.completions)

    def output(self, executed_of: IntArray) -> RequestOutput:
        """Its state for the user."""
        found = self.prompt_logprobs
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=tuple(c.output(executed_of) for c in self.completions),
            finished=self.finished,
            prompt_logprobs=None
            if found is None
            else [found.get(position) for position in range(len(self.prompt_ids))],
        )
