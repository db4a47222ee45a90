"""Counters of an engine since the last reset. Times in seconds, counts in tokens unless named otherwise."""

from dataclasses import dataclass, field

import numpy as np

from tokenrouter.engine.decider import StepDecision
from tokenrouter.engine.step import IntArray
from tokenrouter.kvcache.host import SwapCounts
from tokenrouter.models import ForwardTimes
from tokenrouter.routers.answers import CacheCounts
from tokenrouter.types import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Where one step's time went, in seconds, besides features and router (see ``count_decisions``)."""

    schedule_s: float
    executor_s: float
    sampler_s: float
    memory_s: float
    step_s: float


@dataclass(slots=True)
class EngineStats:
    """What an engine did.

    Attributes:
        route_names: the routes of the engine's table; the index in the three arrays.
        decided_tokens: tokens that got their route, each once, in the step that decided it.
        repeated_tokens: those of them that repeat the decision of an earlier token, without asking the router.
        route_cache: what the router's cache of answers did, where it has one. The router itself counts in it.
        reused_tokens: tokens that ran again on the route they had (recompute after preemption).
        num_preemptions: requests that lost their slots, to the host tier or to be computed again.
        swaps: those to the host tier. The tier itself counts in it: a reset empties it and keeps it.
        shared_tokens: prompt tokens that were not computed, as an earlier request's entries were used.
        num_rejected: requests refused because the queue was full.
        peak_live_slots: most KV slots in use at once.
        peak_live_bytes: most bytes of KV entries at once, full and int8.
        peak_full_bytes: the same if every token that has run were kept in full precision.
        peak_kept_bytes: the same if every token that has run were kept as it is first stored.
        peak_int8_tokens: most entries at once that were int8.
        peak_converted: those of them that were stored in full precision first.
        peak_allocated_bytes: most bytes of KV slots whose memory was in use at once, free ones among them.
        num_compactions: times that entries moved together and the memory behind them was given back.
        retention_decisions: times that the retention policy was asked, per request and layer group.
        evicted_entries: entries that it evicted, in every layer group; those of a recompute count again.
        router_s: features and router.
        executor_s: forwards and logits; ``attention_s`` and ``executor_s_by_path`` (its token-wise operators by
            executor) are parts of it.
        sampler_s: logits to tokens that are accepted; features of the logits, where a router has some, are in both.
        memory_s: eviction, entries that become int8, prefixes that are kept, slots that ended requests give back, and
            compaction.
        requested_tokens, executed_tokens: int64 [phase, route], every token that ran, by what the router asked for
            and by what ran.
        degraded_tokens: int64 [route], those that were sent to a route and ran on another.
    """

    route_names: tuple[str, ...]
    steps: int = 0
    output_tokens: int = 0
    decided_tokens: int = 0
    repeated_tokens: int = 0
    reused_tokens: int = 0
    num_preemptions: int = 0
    swaps: SwapCounts = field(default_factory=SwapCounts)
    route_cache: CacheCounts | None = None
    shared_tokens: int = 0
    num_rejected: int = 0
    peak_live_slots: int = 0
    peak_live_bytes: int = 0
    peak_full_bytes: int = 0
    peak_kept_bytes: int = 0
    peak_int8_tokens: int = 0
    peak_converted: int = 0
    peak_allocated_bytes: int = 0
    num_compactions: int = 0
    retention_decisions: int = 0
    evicted_entries: int = 0
    step_s: float = 0.0
    schedule_s: float = 0.0
    router_s: float = 0.0
    executor_s: float = 0.0
    sampler_s: float = 0.0
    memory_s: float = 0.0
    attention_s: float = 0.0
    executor_s_by_path: dict[str, float] = field(default_factory=dict)
    requested_tokens: IntArray = field(init=False)
    executed_tokens: IntArray = field(init=False)
    degraded_tokens: IntArray = field(init=False)

    def __post_init__(self) -> None:
        shape = (len(Phase), len(self.route_names))
        self.requested_tokens = np.zeros(shape, np.int64)
        self.executed_tokens = np.zeros(shape, np.int64)
        self.degraded_tokens = np.zeros(len(self.route_names), np.int64)

    def reset(self) -> None:
        """Back to zero."""
        self.swaps.reset()
        if self.route_cache is not None:
            self.route_cache.reset()
        fresh = EngineStats(
            route_names=self.route_names, swaps=self.swaps, route_cache=self.route_cache
        )
        for name in self.__slots__:
            setattr(self, name, getattr(fresh, name))

    def count_decisions(self, decision: StepDecision) -> None:
        """Counts the step's fresh decisions and the time they took; holds also when the step fails later."""
        self.decided_tokens += int(decision.fresh_T.sum())
        self.repeated_tokens += decision.num_repeated
        self.router_s += decision.seconds

    def count_tokens(
        self, decision: StepDecision, phase_T: IntArray, ran_T: IntArray
    ) -> dict[str, int]:
        """Counts the tokens at indices ``ran_T``; returns how many ran per executed route."""
        phase, requested, executed = (
            phase_T[ran_T],
            decision.requested_T[ran_T],
            decision.executed_T[ran_T],
        )
        np.add.at(self.requested_tokens, (phase, requested), 1)
        np.add.at(self.executed_tokens, (phase, executed), 1)
        np.add.at(self.degraded_tokens, requested[requested != executed], 1)
        counts = np.bincount(executed, minlength=len(self.route_names)).tolist()
        return dict(zip(self.route_names, counts, strict=True))

    def count_retention(self, num_decisions: int, evicted_entries: int) -> None:
        """Adds what a retention policy did in a step."""
        self.retention_decisions += num_decisions
        self.evicted_entries += evicted_entries

    def add_forward(self, times: ForwardTimes) -> None:
        """Adds a step's time in token-wise operators and attention."""
        self.attention_s += times.attention_s
        for path, seconds in times.by_executor.items():
            self.executor_s_by_path[path] = self.executor_s_by_path.get(path, 0.0) + seconds

    def record(self, times: StepTimes, *, live_slots: int) -> None:
        """Adds one step."""
        self.steps += 1
        self.step_s += times.step_s
        self.schedule_s += times.schedule_s
        self.executor_s += times.executor_s
        self.sampler_s += times.sampler_s
        self.memory_s += times.memory_s
        self.peak_live_slots = max(self.peak_live_slots, live_slots)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that ran."""
        return int(self.executed_tokens[Phase.PREFILL].sum())

    @property
    def decode_tokens(self) -> int:
        """Generated tokens that ran."""
        return int(self.executed_tokens[Phase.DECODE].sum())

    @property
    def num_recomputes(self) -> int:
        """Preemptions that lost their entries; their tokens count in ``reused_tokens`` when they run again."""
        return self.num_preemptions - self.swaps.num_out

    @property
    def overhead_frac(self) -> float:
        """Features and router over the executors' time for the same tokens (NaN before the first step)."""
        return self.router_s / self.executor_s if self.executor_s else float("nan")

    def token_frac(self, route: str, phase: Phase | None = None) -> float:
        """Share of the executed tokens that took ``route``, in one phase or both (NaN when there were none)."""
        counts = self.executed_tokens if phase is None else self.executed_tokens[phase : phase + 1]
        total = int(counts.sum())
        return (
            float(counts[:, self.route_names.index(route)].sum() / total) if total else float("nan")
        )
