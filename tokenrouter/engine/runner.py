"""Runs a step's work: forwards, then the logits of the rows that need them.

T tokens of a step, R rows whose logits are wanted, E hidden size, V vocabulary.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tokenrouter.engine.dispatcher import Work
from tokenrouter.engine.observation import Watcher
from tokenrouter.engine.step import ForwardBuilder, IntArray, PackedStep
from tokenrouter.executors import Executor, ExecutorPool
from tokenrouter.kvcache import KVArena, MeanKeys
from tokenrouter.models import Decoder, ForwardTimes, Observation
from tokenrouter.types import ForwardBatch

LOGITS_ROWS = 256  # rows of [V] held at once when every position's logits are wanted


@dataclass(slots=True)
class RunResult:
    """What the forwards of a step brought.

    Attributes:
        due_R: int64, the chunks that ran and whose next token is now due, in the rows of ``logits_RV``.
        logits_RV: logits of their last token, in the model's dtype; None when no chunk is due.
        ran_T: plan indices of all tokens that ran.
        times: time in token-wise operators and attention.
        seconds: wall time of forwards and logits.
    """

    due_R: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    logits_RV: Tensor | None = None
    ran_T: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    times: ForwardTimes = field(default_factory=ForwardTimes)
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """The layers of a step that run before its tokens are decided.

    Attributes:
        hidden_TE: hidden states after them, in plan order, in the model's dtype.
        observation: what they report so far.
        times: time in token-wise operators and attention; what follows is added.
        seconds: wall time.
    """

    hidden_TE: Tensor
    observation: Observation | None
    times: ForwardTimes
    seconds: float


class Runner:
    """Holds what a forward needs: decoder, executors, arena."""

    def __init__(
        self,
        decoder: Decoder,
        pool: ExecutorPool,
        arena: KVArena,
        builder: ForwardBuilder,
        heads: Sequence[str],
        watcher: Watcher | None = None,
        mean_keys: MeanKeys | None = None,
        after_layer: int = 0,
    ) -> None:
        """``heads`` names, per route, the executor path whose lm_head its tokens use.

        So many layers as ``after_layer`` run before a step's tokens are decided: in all routes they are alike.
        """
        self._decoder = decoder
        self._executors: Mapping[str, Executor] = pool.executors
        self._arena = arena
        self._builder = builder
        self._heads = sorted(set(heads))
        self._head_of = np.array([self._heads.index(head) for head in heads])
        self._watcher = watcher
        self._mean_keys = mean_keys
        num_layers = decoder.config.num_layers
        self._first, self._others = range(after_layer), range(after_layer, num_layers)

    @torch.inference_mode()
    def begin(self, step: PackedStep) -> Begun | None:
        """Runs what comes before the decision; None where that is nothing. Writes KV, changes no request."""
        if not self._first:
            return None
        started, times = time.perf_counter(), ForwardTimes()
        self._start_watching()
        everything = np.arange(len(step.requests))
        forward, rows = self._builder.build(step, everything, np.zeros(len(step.batch), np.int64))
        observation = self._observe(step, everything)
        hidden_TE = self._decode(forward, self._first, times, observation)
        return Begun(
            hidden_TE=hidden_TE[rows],
            observation=observation,
            times=times,
            seconds=time.perf_counter() - started,
        )

    @torch.inference_mode()
    def run(
        self, step: PackedStep, work: Work, executed_T: IntArray, begun: Begun | None = None
    ) -> RunResult:
        """Runs every forward of ``work``; chunks that are due get logits, in order. Writes KV, changes no request.

        Args:
            step: packed.
            work: its forwards; one of all chunks where the step has begun.
            executed_T: the routes of its tokens.
            begun: what ran before they were known.
        """
        started = time.perf_counter()
        result = RunResult(times=ForwardTimes() if begun is None else begun.times)
        due: list[IntArray] = []
        due_hidden: list[Tensor] = []
        if begun is None:
            self._start_watching()
        for of in work.forwards:
            hidden_TE, rows = self._forward(step, of, executed_T, result.times, begun)
            stop_B = np.cumsum(step.length_C[of])
            self._sink_all(step, of, hidden_TE, rows, executed_T)
            due_B = np.flatnonzero(step.is_due_C[of])
            if len(due_B):
                due.append(of[due_B])
                due_hidden.append(hidden_TE[rows[torch.from_numpy(stop_B[due_B] - 1)]])
        if due:
            due_R = result.due_R = np.concatenate(due)
            last_R = step.first_C[due_R] + step.length_C[due_R] - 1
            result.logits_RV = self._logits(torch.cat(due_hidden), executed_T[last_R])
        result.ran_T = step.index(work.running)
        result.seconds = time.perf_counter() - started + (begun.seconds if begun else 0.0)
        return result

    def _forward(
        self,
        step: PackedStep,
        of: IntArray,
        executed_T: IntArray,
        times: ForwardTimes,
        begun: Begun | None,
    ) -> tuple[Tensor, Tensor]:
        """Hidden states ``[T, E]``, and which row each of the chunks' tokens has there; adds to ``times``."""
        forward, rows = self._builder.build(step, of, executed_T)
        if begun is None:
            return self._decode(forward, self._others, times, self._observe(step, of)), rows
        hidden_TE = torch.empty_like(begun.hidden_TE).index_copy_(0, rows, begun.hidden_TE)
        return self._decode(forward, self._others, times, begun.observation, hidden_TE), rows

    def _decode(
        self,
        forward: ForwardBatch,
        layers: range,
        times: ForwardTimes,
        observation: Observation | None,
        hidden_TE: Tensor | None = None,
    ) -> Tensor:
        arena, means = self._arena, self._mean_keys
        if means is not None:
            means.forget_changed()
        return self._decoder.forward(
            forward,
            self._executors,
            arena.layers,
            times,
            observation,
            arena.int8,
            means.layers if means else None,
            layers,
            hidden_TE,
        )

    def _start_watching(self) -> None:
        if self._watcher is not None:
            self._watcher.start_step()

    def _observe(self, step: PackedStep, of: IntArray) -> Observation | None:
        return None if self._watcher is None else self._watcher.observe(step, of)

    def _logits(self, hidden_RE: Tensor, executed_R: IntArray) -> Tensor:
        """Logits of each row by the lm_head of its own path."""
        head_R = self._head_of[executed_R]
        heads = np.unique(head_R).tolist()
        if len(heads) == 1:
            return self._executors[self._heads[heads[0]]].logits(hidden_RE)
        logits_RV = hidden_RE.new_empty(len(head_R), self._decoder.config.vocab_size)
        for head in heads:
            index = torch.from_numpy(np.flatnonzero(head_R == head))
            logits_RV[index] = self._executors[self._heads[head]].logits(hidden_RE[index])
        return logits_RV

    def _sink_all(
        self, step: PackedStep, of: IntArray, hidden_TE: Tensor, rows: Tensor, executed_T: IntArray
    ) -> None:
        """Hands over the logits that chunks ``of`` owe their sinks, of LOGITS_ROWS tokens at once, whose ever they are.

        The lm_head reads all its weights per call, and most chunks owe few rows.
        """
        stop_B = np.cumsum(step.length_C[of])
        owed_B = [(b, self._num_handed(step, int(of[b]))) for b in _wanting(step, of)]
        chunk_R = np.repeat(
            [of[b] for b, _ in owed_B], [step.length_C[of[b]] - skip for b, skip in owed_B]
        ).astype(np.int64)
        if not len(chunk_R):
            return
        offset_R = np.concatenate([np.arange(skip, step.length_C[of[b]]) for b, skip in owed_B])
        first_R = np.concatenate(
            [np.arange(stop_B[b] - step.length_C[of[b]] + skip, stop_B[b]) for b, skip in owed_B]
        )
        for start in range(0, len(chunk_R), LOGITS_ROWS):
            part = slice(start, start + LOGITS_ROWS)
            chunks, offsets = chunk_R[part], offset_R[part]
            hidden_RE = hidden_TE[rows[torch.from_numpy(first_R[part])]]
            logits_RV = self._logits(hidden_RE, executed_T[step.first_C[chunks] + offsets]).float()
            begins = np.flatnonzero(np.diff(chunks, prepend=-1))
            for begin, end in zip(begins, [*begins[1:], len(chunks)], strict=True):
                c = int(chunks[begin])
                position = int(step.start_C[c] + offsets[begin])
                step.requests[c].hand_over(position, logits_RV[begin:end])

    def _num_handed(self, step: PackedStep, c: int) -> int:
        """How many of the chunk's tokens, from its first on, owe no logits."""
        before = step.requests[c].num_handed - int(step.start_C[c])
        return min(max(before, 0), int(step.length_C[c]))


def _wanting(step: PackedStep, of: IntArray) -> list[int]:
    """Which of the chunks ``of`` are of requests that want more than their last token's logits."""
    wanting: list[int] = np.flatnonzero(step.state_C["wants_all_logits"][of]).tolist()
    return wanting
