"""The contract of a scheduling policy and what it answers.

A policy decides which requests run in a step and how many of their tokens; it never looks at routes, weights or
features. Adding one is a class here, a name and a line in ``tokenrouter.engine.build``, and a file in conf/scheduler.
"""

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

from tokenrouter.kvcache import KVPool
from tokenrouter.scheduler.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Tokens ``start`` to ``start + length`` of one request run in this step."""

    request: Request
    start: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """The chunks of a step, at most one per request, and the requests that lost their slots to make it possible."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[Request, ...] = ()


class Scheduler(ABC):
    """Owns the waiting and running requests and asks the pool for their slots.

    Guarantees: the tokens of a plan never exceed ``max_num_batched_tokens``; every chunk has its slots; a request that
    fits the pool alone always gets to run.

    Attributes:
        pool: gives rows and slots.
        max_num_seqs: requests that run at once, at most.
        max_num_batched_tokens: tokens of a plan, at most; at least ``max_num_seqs``.
        waiting: requests without a row, the next one first.
        running: requests with a row, the oldest first.
    """

    def __init__(self, *, pool: KVPool, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {max_num_batched_tokens} must be at least max_num_seqs {max_num_seqs}: "
                "every running request decodes one token per step"
            )
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @abstractmethod
    def schedule(self) -> StepPlan:
        """Chooses the chunks of the next step and gives them slots. May preempt."""

    @abstractmethod
    def finish(self, request: Request) -> None:
        """Releases what a finished or aborted request holds; unknown or already released requests are ignored."""

    def add(self, request: Request) -> None:
        """Queues a new request."""
        self.waiting.append(request)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)
