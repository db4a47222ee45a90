"""One request's state: its tokens, how far they are computed, and the decisions recorded for them."""

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tokenrouter.features import TokenHistory
from tokenrouter.kvcache import Swapped
from tokenrouter.kvcache.retention import EntryStatistics
from tokenrouter.sampling_params import SamplingParams

UNDECIDED = -1
NEVER = 2**31 - 1
LogitsSink = Callable[[int, Tensor], None]

STATE = np.dtype(
    [
        *((name, np.int64) for name in ("number", "prompt_len", "max_total")),
        *((name, np.int64) for name in ("num_computed", "num_run", "last_turn", "waited_steps")),
        *((name, np.int64) for name in ("num_shared", "shares_to")),
        *((name, np.float64) for name in ("waiting_since_s", "queue_s", "first_scheduled_s")),
        *((name, np.bool_) for name in ("is_forced", "wants_all_logits", "finished")),
    ]
)
"""What a step reads and writes of its requests, all at once: see the attributes of Request."""

T = TypeVar("T")


class _InState(Generic[T]):
    """An attribute that lies in ``Request.state``, and with it in the row that the request has."""

    def __init__(self, kind: Callable[[Any], T]) -> None:
        self._kind = kind

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, request: "Request", owner: type) -> T:
        return self._kind(request.state[self._name])

    def __set__(self, request: "Request", value: T) -> None:
        request.state[self._name] = value


class RequestDecision(NamedTuple):
    """What a router that works per request answered: the same for every token of the request."""

    route: int
    score: float
    reason: str


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """A completion in flight; array names end in N, its positions.

    Attributes:
        request_id: unique in the engine.
        params: how to sample and when to stop.
        history: token ids, repeats and prefix hashes, capacity ``max_total``.
        prompt_len: tokens that came with the request.
        max_total: prompt and output together never exceed it.
        forced_ids: teacher forcing: after the prompt these ids are fed instead of sampled ones.
        logits_sink: called with (position, logits) for every position whose logits were asked for.
        wants_all_logits: logits of every position from ``num_handed`` on, not only of the last.
        arrival_s: when it came, on the clock of ``time.perf_counter``; all times are on it.
        index: its number among the completions of one prompt.
        priority: lower is more urgent, where the policy heeds it.
        number: its place in the order of arrival, given by the scheduler.
        num_overtaken: how often a request that came later was admitted before it, or ran on while it was preempted.
        num_handed: positions below it had their logits handed to the sink.
        row: its row in the pool's slot table, -1 while it has none.
        num_preemptions: how often it lost its slots.
        decision: the answer for all of its tokens, where the router works per request.
        requested_N: the router's decision per position (int16), UNDECIDED where there is none yet.
        times_N: when each generated token came, by position, NaN where none did; a forced request's end comes last.
        evicted_at_GN: int32, per layer group and position the number of tokens that the request had when the entry was
            evicted, NEVER where it was not: queries from that position on do not see it. None without retention.
        statistics: what its entries received so far, per layer group, where the retention policy looks at it.
        swapped: its entries in the host tier, while it waits with them.
        prefix_key: what its prompt's entries depend on beside its ids; None where they are not shared.
        state: the numbers below, and copies of some above; of the table's row while it has one.
        last_turn: number of its last chunk or admission among all of both, -1 before.
        num_computed: tokens below it have their KV; preemption by recompute sets it back to 0.
        num_run: tokens below it have run at least once, here or in the request whose prefix it shares; never falls.
        waited_steps: steps that the current decode token has waited for company.
        num_shared: tokens of its prompt that the prefix cache has been given, or that came from it; ``shares_to`` of
            them may be.
        finished: it has ended; a static batch may still hold its slots.
        first_scheduled_s: when it first ran, NaN before.
        queue_s: seconds in which it could not run, up to the last time it did.
        waiting_since_s: since when it cannot run, NaN while it can.
    """

    last_turn = _InState(int)
    num_computed = _InState(int)
    num_run = _InState(int)
    waited_steps = _InState(int)
    num_shared = _InState(int)
    shares_to = _InState(int)
    finished = _InState(bool)
    first_scheduled_s = _InState(float)
    queue_s = _InState(float)
    waiting_since_s = _InState(float)

    request_id: str
    params: SamplingParams
    history: TokenHistory
    prompt_len: int
    max_total: int
    arrival_s: float
    index: int = 0
    priority: int = 0
    number: int = -1
    num_overtaken: int = 0
    forced_ids: Sequence[int] | None = None
    logits_sink: LogitsSink | None = None
    wants_all_logits: bool = False
    num_handed: int = 0
    row: int = -1
    num_preemptions: int = 0
    decision: RequestDecision | None = None
    requested_N: NDArray[np.int16] = field(init=False)
    evicted_at_GN: NDArray[np.int32] | None = None
    statistics: list[EntryStatistics] | None = None
    swapped: Swapped | None = None
    prefix_key: Hashable | None = None
    times_N: NDArray[np.float64] = field(init=False)
    state: Any = field(init=False)

    def __post_init__(self) -> None:
        self.requested_N = np.full(self.max_total, UNDECIDED, np.int16)
        self.times_N = np.full(self.max_total + 1, math.nan)
        self.state = np.zeros(1, STATE)[0]
        self.last_turn = -1
        self.first_scheduled_s = math.nan
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
        """From now (seconds on the request's clock; None: this moment) the request cannot run."""
        if math.isnan(self.waiting_since_s):
            self.waiting_since_s = time.perf_counter() if now_s is None else now_s
