"""One request's state: its tokens, how far they are computed, and the decisions recorded for them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tokenrouter.features import TokenHistory
from tokenrouter.sampling_params import SamplingParams

UNDECIDED = -1
LogitsSink = Callable[[int, Tensor], None]


@dataclass(slots=True, eq=False)
class Request:
    """A completion in flight. ``history`` holds prompt and output; tokens below ``num_computed`` have their KV.

    Attributes:
        request_id: unique in the engine.
        params: how to sample and when to stop.
        history: token ids, repeats and prefix hashes, capacity ``max_total``.
        prompt_len: tokens that came with the request.
        max_total: prompt and output together never exceed it.
        forced_ids: teacher forcing: after the prompt these ids are fed instead of sampled ones.
        logits_sink: called with (position, logits) for every position whose logits were asked for.
        wants_all_logits: logits of every position, not only of the last.
        requested_N: the router's decision per position, UNDECIDED where there is none yet.
        num_handed: positions below it had their logits handed to the sink.
        waited_steps: steps that the current decode token has spent in its route's queue.
    """

    request_id: str
    params: SamplingParams
    history: TokenHistory
    prompt_len: int
    max_total: int
    arrival_s: float
    index: int = 0
    forced_ids: Sequence[int] | None = None
    logits_sink: LogitsSink | None = None
    wants_all_logits: bool = False
    num_computed: int = 0
    num_handed: int = 0
    row: int = -1
    waited_steps: int = 0
    finished: bool = False
    first_scheduled_s: float = float("nan")
    queue_s: float = 0.0
    waiting_since_s: float | None = None
    num_preemptions: int = 0
    token_times_s: list[float] = field(default_factory=list)
    requested_N: NDArray[np.int16] = field(init=False)

    def __post_init__(self) -> None:
        self.requested_N = np.full(self.max_total, UNDECIDED, np.int16)
        self.waiting_since_s = self.arrival_s

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.history)

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is still to be computed: 1 in decode, more in prefill and recompute."""
        return len(self.history) - self.num_computed

    @property
    def output_ids(self) -> list[int]:
        """Tokens after the prompt."""
        ids: list[int] = self.history.ids[self.prompt_len : len(self.history)].tolist()
        return ids

    @property
    def decoding(self) -> bool:
        """Whether the next token to compute is the last one known, and not part of the prompt."""
        return self.num_uncomputed == 1 and self.num_computed >= self.prompt_len

    def hand_over(self, start: int, logits_RV: Tensor) -> None:
        """Gives the sink the logits of positions ``start`` and on, each position once: not again in a recompute."""
        skip = max(self.num_handed - start, 0)
        if self.logits_sink is not None and skip < len(logits_RV):
            self.logits_sink(start + skip, logits_RV[skip:])
            self.num_handed = start + len(logits_RV)

    def start_waiting(self, now_s: float | None = None) -> None:
        """From now on the request could not run."""
        if self.waiting_since_s is None:
            self.waiting_since_s = time.perf_counter() if now_s is None else now_s

    def stop_waiting(self, now_s: float) -> None:
        """The request runs; the time it waited counts as queue time."""
        if self.waiting_since_s is not None:
            self.queue_s += max(now_s - self.waiting_since_s, 0.0)
            self.waiting_since_s = None
        if np.isnan(self.first_scheduled_s):
            self.first_scheduled_s = now_s
