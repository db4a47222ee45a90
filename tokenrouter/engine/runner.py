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
from tokenrouter.kvcache import KVArena
from tokenrouter.models import Decoder, ForwardTimes
from tokenrouter.scheduler import Chunk

LOGITS_ROWS = 256  # rows of [V] held at once when every position's logits are wanted


@dataclass(slots=True)
class RunResult:
    """What the forwards of a step brought.

    Attributes:
        chunks: the chunks that ran and whose next token is now due, in the rows of ``logits_RV``.
        logits_RV: logits of their last token, in the model's dtype; None when no chunk is due.
        ran_T: plan indices of all tokens that ran.
        times: time in token-wise operators and attention.
        seconds: wall time of forwards and logits.
    """

    chunks: list[Chunk] = field(default_factory=list)
    logits_RV: Tensor | None = None
    ran_T: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    times: ForwardTimes = field(default_factory=ForwardTimes)
    seconds: float = 0.0


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
    ) -> None:
        """``heads`` names, per route, the executor path whose lm_head its tokens use."""
        self._decoder = decoder
        self._executors: Mapping[str, Executor] = pool.executors
        self._arena = arena
        self._builder = builder
        self._heads = heads
        self._watcher = watcher

    @torch.inference_mode()
    def run(self, step: PackedStep, work: Work, executed_T: IntArray) -> RunResult:
        """Runs every forward of ``work``; chunks that are due get logits, in order. Writes KV, changes no request."""
        started = time.perf_counter()
        result = RunResult()
        due_hidden: list[Tensor] = []
        due_heads: list[str] = []
        if self._watcher is not None:
            self._watcher.start_step()
        for chunks in work.forwards:
            forward, rows = self._builder.build(step, chunks, executed_T)
            observation = None
            if self._watcher is not None:
                observation = self._watcher.observe([step.chunks[c] for c in chunks])
            hidden_TE = self._decoder.forward(
                forward,
                self._executors,
                self._arena.layers,
                result.times,
                observation,
                self._arena.int8,
            )
            offset = 0
            for c in chunks:
                chunk = step.chunks[c]
                tokens = step.tokens(c)
                chunk_rows = rows[offset : offset + chunk.length]
                offset += chunk.length
                if chunk.request.wants_all_logits:
                    self._sink_all(chunk, hidden_TE[chunk_rows], executed_T[tokens])
                if chunk.start + chunk.length == chunk.request.num_tokens:
                    result.chunks.append(chunk)
                    due_hidden.append(hidden_TE[chunk_rows[-1]])
                    due_heads.append(self._heads[int(executed_T[tokens.stop - 1])])
        if due_hidden:
            result.logits_RV = self._logits(torch.stack(due_hidden), due_heads)
        result.ran_T = step.index(work.running)
        result.seconds = time.perf_counter() - started
        return result

    def _logits(self, hidden_RE: Tensor, heads: Sequence[str]) -> Tensor:
        """Logits of each row by the lm_head of its own path."""
        names = sorted(set(heads))
        if len(names) == 1:
            return self._executors[names[0]].logits(hidden_RE)
        logits_RV = hidden_RE.new_empty(len(heads), self._decoder.config.vocab_size)
        for name in names:
            index = torch.tensor([row for row, head in enumerate(heads) if head == name])
            logits_RV[index] = self._executors[name].logits(hidden_RE[index])
        return logits_RV

    def _sink_all(self, chunk: Chunk, hidden_TE: Tensor, executed_T: IntArray) -> None:
        for start in range(0, chunk.length, LOGITS_ROWS):
            rows = slice(start, min(start + LOGITS_ROWS, chunk.length))
            heads = [self._heads[int(route)] for route in executed_T[rows]]
            chunk.request.hand_over(
                chunk.start + start, self._logits(hidden_TE[rows], heads).float()
            )
