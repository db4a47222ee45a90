"""Requests between admission and their last output: checks, sampling state, text, and what is handed back.

C completions due in a step, V vocabulary.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tokenrouter.engine.admission import (
    check_forced_ids,
    check_priority,
    check_sink,
    encode_prompt,
    longest_total,
)
from tokenrouter.engine.completion import Completion, LogprobEntry, RequestGroup
from tokenrouter.engine.completion_rows import NO_ID, CompletionRows, next_tokens
from tokenrouter.engine.detokenizer import IncrementalDetokenizer
from tokenrouter.engine.logits import top_logprobs
from tokenrouter.engine.sampler import SampledTokens, Sampler
from tokenrouter.engine.sampling_rows import SamplerState, SamplingBatch
from tokenrouter.engine.step import IntArray, PackedStep
from tokenrouter.features import TokenHistory
from tokenrouter.kvcache import KVPool
from tokenrouter.models import ModelConfig
from tokenrouter.outputs import RequestOutput
from tokenrouter.sampling_params import SamplingParams
from tokenrouter.scheduler import Request
from tokenrouter.scheduler.request import LogitsSink


class Accepted(NamedTuple):
    """What a step's tokens brought: how many are new, and the completions that ended with them."""

    num_new: int
    ended: tuple[Request, ...]


class LiveRequests:
    """All unfinished requests of an engine, by id.

    Args:
        tokenizer: None: prompts are ids, and outputs have no text.
        config: the model's.
        executed_of: requested to executed route, for the outputs.
        is_special_V: which ids begin a turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        config: ModelConfig,
        executed_of: IntArray,
        is_special_V: NDArray[np.bool_],
    ) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._executed_of = executed_of
        self._is_special_V = is_special_V
        self._rows = CompletionRows(config.eos_token_ids, config.vocab_size)
        self._groups: dict[str, RequestGroup] = {}
        self._owner: dict[Request, tuple[RequestGroup, Completion]] = {}
        self._changed: dict[RequestGroup, None] = {}
        self._handed_back: list[RequestOutput] = []

    @property
    def has_changed(self) -> bool:
        """Whether ``take_changed`` has something to hand back."""
        return bool(self._changed or self._handed_back)

    def admit(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        arrival_s: float,
        pool: KVPool,
        priority: int = 0,
        forced_ids: Sequence[int] | None = None,
        logits_sink: LogitsSink | None = None,
        wants_all_logits: bool = False,
        logits_from: int = 0,
        stream: bool = True,
    ) -> list[Request]:
        """Checks a request and makes one Request per completion; arguments as in ``LLMEngine.add_request``.

        Raises:
            ValueError: it cannot run; nothing of it is kept.
        """
        if request_id in self._groups:
            raise ValueError(
                f"request id {request_id!r} is already in use by an unfinished request"
            )
        check_sink(params, logits_sink, forced_ids, wants_all_logits, logits_from)
        check_priority(priority)
        ids = encode_prompt(prompt, self._tokenizer, self._config.vocab_size)
        forced_ids = check_forced_ids(forced_ids, self._config.vocab_size)
        num_forced = None if forced_ids is None else len(forced_ids)
        max_total = longest_total(len(ids), params, self._config.max_model_len, pool, num_forced)
        params.check_vocab(self._config.vocab_size, self._config.eos_token_ids)
        group = RequestGroup(
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
                history=TokenHistory(ids, max_total, self._is_special_V),
                prompt_len=len(ids),
                max_total=max_total,
                arrival_s=arrival_s,
                index=index,
                priority=priority,
                forced_ids=forced_ids,
                logits_sink=logits_sink,
                wants_all_logits=wants_all_logits,
                num_handed=logits_from,
            )
            self._add_completion(group, request)
        self._groups[request_id] = group
        return [completion.request for completion in group.completions]

    def sample(
        self, step: PackedStep, due_C: IntArray, logits_CV: Tensor | None, sampler: Sampler
    ) -> SampledTokens | None:
        """Hands forced completions' logits to their sinks and draws the next token of the others.

        Changes no request, so that a step can be tried again when a sink or the draw raises.

        Args:
            step: as it ran.
            due_C: the chunks whose next token is due.
            logits_CV: of their last tokens.
            sampler: draws.
        """
        self._rows.meet(step, self._state_of, self._is_watched)
        if logits_CV is None:
            return None
        is_forced_C = step.state_C["is_forced"][due_C]
        for c in np.flatnonzero(is_forced_C).tolist():
            request = step.requests[due_C[c]]
            if not request.wants_all_logits:
                request.hand_over(request.num_tokens - 1, logits_CV[c : c + 1].float())
        free = np.flatnonzero(~is_forced_C)
        if not len(free):
            return None
        row_B, prompt_len_B = step.row_C[due_C[free]], step.state_C["prompt_len"][due_C[free]]
        batch = SamplingBatch(
            settings_B=self._rows.settings_R[row_B],
            num_output_B=step.tokens.history.length_R[row_B] - prompt_len_B,
            state_of=lambda b: self._state_of(step.requests[due_C[free[b]]]),
        )
        rows = logits_CV if len(free) == len(due_C) else logits_CV[free]
        return sampler.sample(rows, batch, self._config.eos_token_ids)

    def accept(self, step: PackedStep, due_C: IntArray, sampled: SampledTokens | None) -> Accepted:
        """Appends the drawn (or forced) tokens and says what is done, for the scheduler to release.

        Only completions that somebody looks at, or that may end, are looked at one by one.
        """
        now, tokens, row_C = time.perf_counter(), step.tokens, step.row_C[due_C]
        free = np.flatnonzero(~step.state_C["is_forced"][due_C])
        if sampled is not None and len(free) == len(due_C):
            ids_C = sampled.ids_B.cpu().numpy()
        else:
            ids_C = next_tokens(sampled, [step.requests[c] for c in due_C.tolist()])
        tokens.time_RN[row_C, tokens.history.length_R[row_C]] = now
        grows_C = ids_C != NO_ID
        grown_C = ids_C[grows_C]
        tokens.history.append(row_C[grows_C], grown_C, self._is_special_V[grown_C])
        logprobs: dict[int, LogprobEntry | None] = {}
        if sampled is not None and sampled.logprobs is not None:
            logprobs = dict(zip(free.tolist(), sampled.logprobs, strict=True))
        ended = []
        for c in self._rows.to_visit(tokens, row_C, ids_C).tolist():
            request = step.requests[due_C[c]]
            if self._visit(request, int(ids_C[c]), logprobs.get(c), now):
                ended.append(request)
        return Accepted(int(grows_C.sum()), tuple(ended))

    def _visit(
        self, request: Request, token_id: int, logprobs: LogprobEntry | None, now_s: float
    ) -> bool:
        """Looks at a completion that has got a token, or none more where it is forced; whether it ends."""
        group, completion = self._owner[request]
        if request.forced_ids is None:
            if logprobs is not None:
                logprobs = self._with_text(logprobs)
            completion.take(token_id, logprobs, self._config.eos_token_ids)
        elif token_id == NO_ID:
            completion.finish_reason = "length"
        ended = completion.finish_reason is not None
        if group.stream or ended:
            self._changed[group] = None
        if ended:
            completion.finished_s, request.finished = now_s, True
        return ended

    def _state_of(self, request: Request) -> SamplerState:
        return self._owner[request][1].state

    def _is_watched(self, request: Request) -> bool:
        group, completion = self._owner[request]
        return group.stream or request.forced_ids is not None or completion.looks_at_tokens

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
        outputs = self._handed_back + [group.output(self._executed_of) for group in changed]
        self._handed_back = []
        for group in changed:
            if group.finished:
                self.forget(group.request_id)
        return outputs

    def hand_back(self, outputs: list[RequestOutput]) -> None:
        """What was taken last did not reach the caller: the next call takes it first."""
        self._handed_back = outputs

    def forget(self, request_id: str) -> None:
        """Drops a request without an output; its completions must not be scheduled any more."""
        self._handed_back = [one for one in self._handed_back if one.request_id != request_id]
        group = self._groups.pop(request_id, None)
        if group is not None:
            self._changed.pop(group, None)
            for completion in group.completions:
                del self._owner[completion.request]

    def _add_completion(self, group: RequestGroup, request: Request) -> None:
        """The first completion also hands over the prompt's logits, where they are wanted."""
        if group.prompt_logprobs is not None and request.index == 0:
            request.wants_all_logits = True
            request.logits_sink = self._prompt_sink(group, request.params)
        completion = self._completion(request, list(group.prompt_ids))
        group.completions.append(completion)
        self._owner[request] = (group, completion)

    def _completion(self, request: Request, ids: list[int]) -> Completion:
        params = request.params
        detokenizer = None
        if params.detokenize and self._tokenizer is not None:
            eos = self._config.eos_token_ids
            detokenizer = IncrementalDetokenizer(self._tokenizer, params, ids, eos)
        elif params.stop_strings:
            raise ValueError("stop strings need a tokenizer, and this model has none")
        return Completion(
            request=request,
            state=SamplerState(params, ids, index=request.index),
            detokenizer=detokenizer,
            logprobs=[] if params.logprobs is not None else None,
        )

    def _prompt_sink(self, group: RequestGroup, params: SamplingParams) -> LogitsSink:
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

    def _with_text(self, entry: LogprobEntry) -> LogprobEntry:
        if self._tokenizer is None:
            return entry
        return {
            i: replace(value, decoded_token=self._tokenizer.decode([i]))
            for i, value in entry.items()
        }
