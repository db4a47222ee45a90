"""The contract of a scheduler and what it answers.

A scheduler decides which requests run in a step and how many of their tokens; it never looks at routes, weights or
features. A policy is a class on ``ContinuousScheduler`` with one function, ``rank``, a line in
``tokenrouter.scheduler.POLICIES`` and a file in conf/scheduler.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenrouter.kvcache import HostTier, KVPool
from tokenrouter.scheduler.limits import SchedulerLimits
from tokenrouter.scheduler.request import Request
from tokenrouter.scheduler.sharing import PrefixSharing
from tokenrouter.scheduler.token_rows import TokenRows


class QueueFullError(ValueError):
    """A request was refused because so many wait already; the same one may be taken later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """The chunks of a step, at most one per request: neighbouring tokens of it that run together.

    Attributes:
        requests: of chunk c, C of them; ``row_C`` are their rows.
        start_C, length_C: int64, its first position and its tokens.
        preempted: requests that lost their slots to make it possible.
        num_shared_tokens: tokens that newly admitted requests need not compute, as a cached prefix has them.
    """

    requests: tuple[Request, ...]
    row_C: NDArray[np.int64]
    start_C: NDArray[np.int64]
    length_C: NDArray[np.int64]
    preempted: tuple[Request, ...] = ()
    num_shared_tokens: int = 0


class Scheduler(ABC):
    """Owns the waiting and running requests and asks the pool for their slots.

    Guarantees: the tokens of a plan never exceed the limits; every chunk has its slots; no chunk crosses a multiple of
    ``cut_every``; a request that fits the pool alone always gets to run, and is passed by at most
    ``limits.max_overtaken`` requests that came later.

    Attributes:
        pool: gives rows and slots.
        limits: of a step, and of waiting.
        max_num_seqs: requests that run at once, at most; the limits' unless it is lowered.
        cut_every: a chunk ends at the next multiple of it, in the request's own positions; None: anywhere.
        host: keeps the entries of preempted requests while it has room; None, or full: they are computed again.
        sharing: hands prefixes from request to request; None: each computes its own.
        tokens: what is known of the tokens of the running requests.
        waiting: requests without a row, the next one first.
        running: requests with a row, in the order in which they got it.
    """

    def __init__(
        self,
        *,
        pool: KVPool,
        limits: SchedulerLimits,
        cut_every: int | None = None,
        host: HostTier | None = None,
        sharing: PrefixSharing | None = None,
    ) -> None:
        if cut_every is not None and cut_every < 1:
            raise ValueError(f"cut_every must be at least 1, got {cut_every}")
        self.pool = pool
        self.limits = limits
        self.max_num_seqs = limits.max_num_seqs
        self.cut_every = cut_every
        self.host = host
        self.sharing = sharing
        self.tokens = TokenRows(pool.max_rows, pool.max_len)
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    @abstractmethod
    def schedule(self) -> StepPlan:
        """Chooses the chunks of the next step and gives them slots. May preempt."""

    @abstractmethod
    def finish(self, request: Request) -> None:
        """Releases what a finished or aborted request holds; unknown or already released requests are ignored."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Queues a new request, also when the queue is full."""

    @property
    def is_full(self) -> bool:
        """Whether as many requests wait as may; preempted ones wait, too."""
        most = self.limits.max_num_waiting
        return most is not None and len(self.waiting) >= most

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)
