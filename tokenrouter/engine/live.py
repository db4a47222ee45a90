"""Requests between admission and their last output: checks, sampling state, text, and what is handed back.

C completions due in a step, V vocabulary.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from tokenrouter.engine.admission import encode_prompt, longest_total
from tokenrouter.engine.detokenizer import IncrementalDetokenizer
from tokenrouter.engine.logits import top_logprobs
from tokenrouter.engine.sampler import SampledTokens, Sampler, SamplerState, check_stop
from tokenrouter.engine.step import IntArray
from tokenrouter.features import TokenHistory
from tokenrouter.models import ModelConfig
from tokenrouter.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from tokenrouter.sampling_params import SamplingParams
from tokenrouter.scheduler import UNDECIDED, Chunk, Request, Scheduler
from tokenrouter.scheduler.request import LogitsSink


@dataclass(slots=True, eq=False)
class _Completion:
    """One of a prompt's completions."""

    request: Request
    state: SamplerState
    detokenizer: IncrementalDetokenizer | None
    logprobs: list[dict[int, Logprob]] | None
    output_ids: list[int] = field(default_factory=list)
    num_detokenized: int = 0
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    finished_s: float = math.nan


@dataclass(slots=True, eq=False)
class _Group:
    """A request as its user knows it."""

    request_id: str
    prompt: str | None
    prompt_ids: tuple[int, ...]
    stream: bool
    completions: list[_Completion] = field(default_factory=list)
    prompt_logprobs: dict[int, dict[int, Logprob]] | None = None

    @property
    def finished(self) -> bool:
        return all(c.finish_reason is not None for c in self.completions)


class LiveRequests:
    """All unfinished requests of an engine, by id."""

    def __init__(self, tokenizer: Any, config: ModelConfig, executed_of: IntArray) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._executed_of = executed_of
        self._groups: dict[str, _Group] = {}
        self._owner: dict[Request, tuple[_Group, _Completion]] = {}
        self._changed: dict[_Group, None] = {}

    @property
    def has_changed(self) -> bool:
        """Whether ``take_changed`` has something to hand back."""
        return bool(self._changed)

    def admit(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        arrival_s: float,
        num_slots: int,
        forced_ids: Sequence[int] | None = None,
        logits_sink: LogitsSink | None = None,
        wants_all_logits: bool = False,
        stream: bool = True,
    ) -> list[Request]:
        """Checks a request and makes its completions; raises ValueError and keeps nothing when it cannot run."""
        if request_id in self._groups:
            raise ValueError(
                f"request id {request_id!r} is already in use by an unfinished request"
            )
        if wants_all_logits and (logits_sink is None or params.prompt_logprobs is not None):
            raise ValueError(
                "wants_all_logits needs a logits_sink, and cannot be combined with prompt_logprobs"
            )
        ids = encode_prompt(prompt, self._tokenizer, self._config.vocab_size)
        max_total = longest_total(
            len(ids),
            params,
            self._config.max_model_len,
            num_slots,
            None if forced_ids is None else len(forced_ids),
        )
        params.check_vocab(self._config.vocab_size)
        group = _Group(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=tuple(ids),
            stream=stream,
            prompt_logprobs={} if params.prompt_logprobs is not None else None,
        )
        for index in range(params.n):
            request = Request(
                request_id=request_id if params.n == 1 else f"{request_id}#{index}",
                params=params,
                history=TokenHistory(ids, max_total),
                prompt_len=len(ids),
                max_total=max_total,
                arrival_s=arrival_s,
                index=index,
                forced_ids=forced_ids,
                logits_sink=logits_sink,
                wants_all_logits=wants_all_logits,
            )
            if group.prompt_logprobs is not None and index == 0:
                request.wants_all_logits, request.logits_sink = (
                    True,
                    self._prompt_sink(group, params),
                )
            completion = self._completion(request, ids)
            group.completions.append(completion)
            self._owner[request] = (group, completion)
        self._groups[request_id] = group
        return [completion.request for completion in group.completions]

    def sample(
        self, chunks: Sequence[Chunk], logits_CV: Tensor | None, sampler: Sampler
    ) -> SampledTokens | None:
        """Hands forced completions' logits to their sinks and draws the next token of the others.

        Changes no request, so that a step can be tried again when a sink or the draw raises.
        """
        for c, chunk in enumerate(chunks):
            request = chunk.request
            if request.forced_ids is not None and not request.wants_all_logits:
                assert logits_CV is not None
                request.hand_over(request.num_tokens - 1, logits_CV[c : c + 1].float())
        free = [c for c, chunk in enumerate(chunks) if chunk.request.forced_ids is None]
        if not free or logits_CV is None:
            return None
        states = [self._owner[chunks[c].request][1].state for c in free]
        rows = logits_CV if len(free) == len(chunks) else logits_CV[free]
        return sampler.sample(rows, states, self._config.eos_token_ids)

    def accept(
        self,
        chunks: Sequence[Chunk],
        sampled: SampledTokens | None,
        scheduler: Scheduler,
    ) -> int:
        """Appends the drawn (or forced) tokens, ends what is done; returns the number of new tokens."""
        now = time.perf_counter()
        drawn = iter(range(len(chunks)))
        ids = sampled.ids_B.tolist() if sampled is not None else []
        num_new = 0
        for chunk in chunks:
            request = chunk.request
            group, completion = self._owner[request]
            if request.forced_ids is not None:
                num_new += self._feed_forced(request, completion, now)
            else:
                row = next(drawn)
                logprobs = sampled.logprobs[row] if sampled is not None else None
                self._append(request, completion, ids[row], logprobs, now)
                num_new += 1
            if group.stream or completion.finish_reason is not None:
                self._changed[group] = None
            if completion.finish_reason is not None:
                completion.finished_s = now
                request.finished = True
                scheduler.finish(request)
        return num_new

    def abort(self, request_id: str) -> list[Request]:
        """Ends a request's unfinished completions; returns them, for the scheduler to release."""
        group = self._groups.get(request_id)
        if group is None:
            return []
        ended = []
        for completion in group.completions:
            if completion.finish_reason is None:
                completion.finish_reason, completion.finished_s = "abort", time.perf_counter()
                completion.request.finished = True
                ended.append(completion.request)
        self._changed[group] = None
        return ended

    def take_changed(self) -> list[RequestOutput]:
        """Outputs of the requests that changed since the last call; finished ones are forgotten."""
        changed = [group for group in self._changed if group.stream or group.finished]
        self._changed.clear()
        outputs = [self._output(group) for group in changed]
        for group in changed:
            if group.finished:
                self.forget(group.request_id)
        return outputs

    def forget(self, request_id: str) -> None:
        """Drops a request without an output; its completions must not be scheduled any more."""
        group = self._groups.pop(request_id, None)
        if group is not None:
            self._changed.pop(group, None)
            for completion in group.completions:
                del self._owner[completion.request]

    def _completion(self, request: Request, ids: list[int]) -> _Completion:
        params = request.params
        detokenizer = None
        if params.detokenize and self._tokenizer is not None:
            eos = self._config.eos_token_ids
            detokenizer = IncrementalDetokenizer(self._tokenizer, params, ids, eos)
        elif params.stop_strings:
            raise ValueError("stop strings need a tokenizer, and this model has none")
        return _Completion(
            request=request,
            state=SamplerState(params, ids, index=request.index),
            detokenizer=detokenizer,
            logprobs=[] if params.logprobs is not None else None,
        )

    def _prompt_sink(self, group: _Group, params: SamplingParams) -> LogitsSink:
        store, ids = group.prompt_logprobs, group.prompt_ids
        assert store is not None and params.prompt_logprobs is not None
        k = params.prompt_logprobs

        def sink(start: int, logits_RV: Tensor) -> None:
            count = min(len(logits_RV), len(ids) - 1 - start)
            if count > 0:
                actual = logits_RV.new_tensor(ids[start + 1 : start + 1 + count]).long()
                for offset, entry in enumerate(top_logprobs(logits_RV[:count], actual, k)):
                    store[start + 1 + offset] = self._with_text(entry)

        return sink

    def _with_text(self, entry: dict[int, Logprob]) -> dict[int, Logprob]:
        if self._tokenizer is None:
            return entry
        return {
            i: replace(value, decoded_token=self._tokenizer.decode([i]))
            for i, value in entry.items()
        }

    def _feed_forced(self, request: Request, completion: _Completion, now: float) -> int:
        assert request.forced_ids is not None
        fed = request.num_tokens - request.prompt_len
        request.token_times_s.append(now)
        if fed == len(request.forced_ids):
            completion.finish_reason = "length"
            return 0
        request.history.append(int(request.forced_ids[fed]))
        return 1

    def _append(
        self,
        request: Request,
        completion: _Completion,
        token: int,
        logprobs: dict[int, Logprob] | None,
        now: float,
    ) -> None:
        request.history.append(token)
        request.token_times_s.append(now)
        completion.state.advance(token)
        if completion.logprobs is not None and logprobs is not None:
            completion.logprobs.append(self._with_text(logprobs))
            completion.cumulative_logprob += logprobs[token].logprob
        completion.output_ids.append(token)
        room = request.max_total - request.prompt_len
        stop = check_stop(request.params, completion.output_ids, self._config.eos_token_ids, room)
        if stop is not None:
            completion.finish_reason, completion.stop_reason = stop
        if request.params.stop_strings and completion.detokenizer is not None:
            _detokenize(completion)
            if completion.detokenizer.stop_hit is not None:
                completion.finish_reason, completion.stop_reason = (
                    "stop",
                    completion.detokenizer.stop_hit,
                )

    def _output(self, group: _Group) -> RequestOutput:
        prompt_logprobs = None
        if group.prompt_logprobs is not None:
            found = group.prompt_logprobs
            prompt_logprobs = [found.get(position) for position in range(len(group.prompt_ids))]
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=group.prompt_ids,
            outputs=tuple(self._completion_output(c) for c in group.completions),
            finished=group.finished,
            prompt_logprobs=prompt_logprobs,
        )

    def _completion_output(self, completion: _Completion) -> CompletionOutput:
        request, detokenizer = completion.request, completion.detokenizer
        text = delta = ""
        if detokenizer is not None:
            _detokenize(completion)
            if completion.finish_reason is not None:
                reason = detokenizer.finish(completion.finish_reason)
                if completion.finish_reason != "abort":
                    completion.finish_reason = reason
                    completion.stop_reason = detokenizer.stop_hit or completion.stop_reason
            delta, text = detokenizer.take_delta(), detokenizer.text
        ended = completion.finish_reason is not None
        return CompletionOutput(
            index=request.index,
            text=text,
            delta=delta,
            token_ids=tuple(completion.output_ids),
            cumulative_logprob=None
            if completion.logprobs is None
            else completion.cumulative_logprob,
            logprobs=None if completion.logprobs is None else list(completion.logprobs),
            routes=self._routes(completion) if ended else (),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            metrics=_metrics(completion) if ended else None,
        )

    def _finish_text(self, completion: _Completion, detokenizer: IncrementalDetokenizer) -> None:
        """Flushes what was held back; the last character may complete a stop string."""
        assert completion.finish_reason is not None
        completion.finish_reason = detokenizer.finish(completion.finish_reason)
        if detokenizer.stop_hit is not None:
            completion.stop_reason = detokenizer.stop_hit

    def _routes(self, completion: _Completion) -> tuple[int, ...]:
        request = completion.request
        num_run = request.num_computed
        if request.num_preemptions and completion.finish_reason == "abort":
            num_run = request.num_tokens - 1  # it counted from 0 again; all of these once ran
        requested_N = request.requested_N[: request.num_tokens].copy()
        requested_N[num_run:] = UNDECIDED
        executed_N = np.where(requested_N < 0, -1, self._executed_of[requested_N])
        return tuple(executed_N.tolist())


def _detokenize(completion: _Completion) -> None:
    """Feeds the tokens that the detokenizer has not seen.

    Every step when streaming or looking for stop strings, once at the end otherwise.
    """
    assert completion.detokenizer is not None
    for token in completion.output_ids[completion.num_detokenized :]:
        completion.detokenizer.append(token)
    completion.num_detokenized = len(completion.output_ids)


def _metrics(completion: _Completion) -> RequestMetrics:
    request = completion.request
    times = request.token_times_s
    return RequestMetrics(
        arrival_s=request.arrival_s,
        first_scheduled_s=request.first_scheduled_s,
        first_token_s=times[0] if times else math.nan,
        finished_s=completion.finished_s,
        queue_s=request.queue_s,
        token_times_s=tuple(times),
        num_preemptions=request.num_preemptions,
    )
