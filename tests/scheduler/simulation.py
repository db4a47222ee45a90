"""Drives a scheduling policy without a model: what it plans is done, or put off, and checked."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from tokenrouter.features import TokenHistory
from tokenrouter.kvcache import HostTier, KVArena, KVPool, PrefixCache
from tokenrouter.kvcache.retention import RetentionOptions
from tokenrouter.sampling_params import SamplingParams
from tokenrouter.scheduler import (
    POLICIES,
    PrefixSharing,
    Request,
    Scheduler,
    SchedulerLimits,
    StaticBatchScheduler,
    StepPlan,
)
from tokenrouter.scheduler.request import NEVER


def request(name: str, prompt_len: int, num_output: int, priority: int = 0) -> Request:
    """A request that generates ``num_output`` tokens, whatever they are."""
    return Request(
        request_id=name,
        params=SamplingParams(max_tokens=num_output),
        history=TokenHistory([5] * prompt_len, prompt_len + num_output),
        prompt_len=prompt_len,
        max_total=prompt_len + num_output,
        arrival_s=0.0,
        priority=priority,
    )


def lengths(plan: StepPlan) -> dict[str, int]:
    """Planned tokens by the request's name."""
    return {chunk.request.request_id: chunk.length for chunk in chunks(plan)}


class Chunk(NamedTuple):
    """Tokens ``start`` to ``start + length`` of one request."""

    request: Request
    start: int
    length: int


def chunks(plan: StepPlan) -> list[Chunk]:
    """The plan's, one by one."""
    spans = zip(plan.requests, plan.start_C.tolist(), plan.length_C.tolist(), strict=True)
    return [Chunk(*span) for span in spans]


class Simulation:
    """A scheduler, and what an engine would do with its plans.

    Args:
        scheduler: with or without a host tier and prefix sharing.
        retention: entries are evicted by it, and their slots are free while the request runs; None: none is.
    """

    def __init__(self, scheduler: Scheduler, retention: RetentionOptions | None = None) -> None:
        self.scheduler = scheduler
        self.retention = retention
        self.num_evicted = self.num_swapped = self.num_shared_tokens = 0
        self.pool: KVPool = scheduler.pool
        self.requests: list[Request] = []
        self.num_preemptions = 0
        self.num_passed: Counter[str] = Counter()
        self._unplanned: Counter[str] = Counter()
        self._num_stood_back = 0

    def add(self, prompt_len: int, num_output: int, priority: int = 0) -> Request:
        """Queues a request; its name is its number."""
        made = request(str(len(self.requests)), prompt_len, num_output, priority)
        self.requests.append(made)
        self.scheduler.add(made)
        return made

    def abort(self, victim: Request) -> None:
        """As the engine aborts."""
        victim.finished = True
        self.scheduler.finish(victim)
        self.pool.check_integrity()

    def step(self, put_off: Callable[[Request], bool] = lambda _: False) -> StepPlan:
        """Plans, checks the plan and runs it, but for decode tokens that ``put_off`` keeps for later."""
        waiting, running = list(self.scheduler.waiting), list(self.scheduler.running)
        plan = self.scheduler.schedule()
        self.check(plan)
        self._check_order(waiting)
        self._check_waits([r for r in running if not r.finished], plan)
        self.num_preemptions += len(plan.preempted)
        self.num_swapped += sum(one.swapped is not None for one in plan.preempted)
        self.num_shared_tokens += plan.num_shared_tokens
        for index, chunk in enumerate(chunks(plan)):
            one = chunk.request
            if index and one.decoding and put_off(one):
                one.waited_steps += 1
                continue  # an engine runs at least one chunk of a plan
            stop = chunk.start + chunk.length
            self.scheduler.tokens.advance(np.array([one.row]), np.array([stop]))
            if one.num_computed == one.num_tokens:
                one.history.append(5)
                one.finished = one.num_tokens == one.max_total
            self._retire(one, chunk.start)
            if one.finished:
                self.scheduler.finish(one)
            self.pool.check_integrity()
        return plan

    def _retire(self, one: Request, start: int) -> None:
        """Evicts what is due and offers the prompt's beginning to others, as the engine does after a chunk."""
        if self.retention is not None:
            if start == 0:
                one.evicted_at_GN = np.full((1, one.max_total), NEVER, np.int32)
            if one.num_computed % self.retention.interval == 0 and not one.finished:
                self._evict(one, self.retention)
        if self.scheduler.sharing is not None:
            one.requested_N[: one.num_computed] = 0
            self.scheduler.sharing.offer(one)

    def _evict(self, one: Request, retention: RetentionOptions) -> None:
        """All but the newest entries that the budget leaves."""
        table = self.pool.tables[0]
        kept = int(table.num_kept_R[one.row])
        most = retention.policy.max_kept(one.num_computed)
        is_kept_N = np.arange(kept) >= kept - max(most, retention.recent)
        assert one.evicted_at_GN is not None
        one.evicted_at_GN[0, table.positions_RN[one.row, :kept][~is_kept_N]] = one.num_computed
        self.num_evicted += self.pool.evict(one.row, 0, is_kept_N)

    def run(self, put_off: Callable[[Request], bool] = lambda _: False) -> int:
        """Steps until nothing is left; returns the number of steps."""
        steps, empty = 0, 0
        while self.scheduler.has_unfinished:
            plan = self.step(put_off)
            steps += 1
            empty = 0 if plan.requests else empty + 1
            assert empty < 3, "the policy plans nothing though requests wait"
            assert steps < 5000, "requests never finish"
        assert self.pool.available == self.pool.num_slots, "slots leaked"
        assert self.scheduler.host is None or not self.scheduler.host.live, "host slots leaked"
        assert self.pool.num_free_rows == len(self.pool.tables[0].num_kept_R), "rows leaked"
        return steps

    def check(self, plan: StepPlan) -> None:
        """What a plan promises."""
        self.pool.check_integrity()
        limits = self.scheduler.limits
        planned = plan.requests
        assert len(set(planned)) == len(planned), "two chunks of one request"
        decode = sum(c.length for c in chunks(plan) if c.request.decoding)
        prompt = sum(c.length for c in chunks(plan) if not c.request.decoding)
        assert decode + prompt <= limits.max_num_batched_tokens
        assert decode <= (limits.max_decode_tokens or decode)
        assert prompt <= (limits.max_prefill_tokens or prompt)
        assert len(self.scheduler.running) <= self.scheduler.max_num_seqs
        cut = self.scheduler.cut_every
        for chunk in chunks(plan):
            one, stop = chunk.request, chunk.start + chunk.length
            assert one in self.scheduler.running and not one.finished
            assert chunk.length > 0 and chunk.start == one.num_computed
            assert stop <= one.num_tokens
            assert self.pool.tables[0].num_seen_R[one.row] >= stop, "no slots"
            assert cut is None or chunk.start // cut == (stop - 1) // cut, "a chunk crosses a cut"
        for one in plan.preempted:
            assert one not in planned and one not in self.scheduler.running
            assert one in self.scheduler.waiting and one.row == -1 and one.waited_steps == 0
            assert one.num_computed == (one.swapped.num_seen if one.swapped else 0)

    def _check_order(self, waiting: list[Request]) -> None:
        """Counts by itself how often later requests were admitted first, and holds it against the bound."""
        running = self.scheduler.running
        admitted = [one for one in running if one in waiting]
        for one in waiting:
            before = admitted[: admitted.index(one)] if one in admitted else admitted
            self.num_passed[one.request_id] += sum(one.number < other.number for other in before)
        assert max(self.num_passed.values(), default=0) <= self.scheduler.limits.max_overtaken
        assert all(r.num_overtaken <= self.scheduler.limits.max_overtaken for r in self.requests)

    def _check_waits(self, running: list[Request], plan: StepPlan) -> None:
        """Decode tokens take turns, and a phase stands back no longer than it may."""
        limits = self.scheduler.limits
        longest = 0 if limits.phase_order == "mixed" else limits.max_phase_wait_steps
        turns = math.ceil(limits.max_num_seqs / (limits.max_decode_tokens or limits.max_num_seqs))
        planned = set(plan.requests)
        for one in plan.preempted:  # its turn begins anew when it is back
            self._unplanned[one.request_id] = 0
        running = [one for one in running if one in self.scheduler.running]  # not preempted
        for one in running:
            waits = one.decoding and one not in planned
            count = self._unplanned[one.request_id] + 1 if waits else 0
            self._unplanned[one.request_id] = count
            assert count < turns * (longest + 1), "a decode token waits longer than its turn"
        back = limits.phase_order == "prefill_first"
        waits = any(one.decoding == back for one in running)
        if not waits or any(one.decoding == back for one in planned):
            self._num_stood_back = 0
        elif not plan.preempted:
            self._num_stood_back += 1
        assert self._num_stood_back <= longest, "a phase stands back too long"


def simulate(
    policy: str = "fcfs",
    *,
    slots: int = 100,
    rows: int = 8,
    tokens: int = 16,
    max_len: int = 100,
    batch_size: int = 3,
    cut_every: int | None = None,
    host_slots: int = 0,
    shares: bool = False,
    retention: RetentionOptions | None = None,
    **limits: Any,
) -> Simulation:
    """A simulation of a policy, with the limits' own names for what is not in the signature.

    Args:
        policy: of the scheduler.
        slots, rows, max_len: of the pool.
        tokens: of a step.
        batch_size: of ``static_batch``.
        cut_every: with ``retention``, its interval instead.
        host_slots: entries that the host tier holds; 0: there is none.
        shares: prompts share their beginnings; all begin alike.
        retention: entries are evicted by it.
    """
    cut_every = retention.interval if retention is not None else cut_every
    slots_for = None if retention is None else retention.max_live
    pool = KVPool(num_slots=slots, max_rows=rows, max_len=max_len, slots_for=slots_for)
    parts: dict[str, Any] = {
        "pool": pool,
        "limits": SchedulerLimits(max_num_seqs=rows, max_num_batched_tokens=tokens, **limits),
        "cut_every": cut_every,
    }
    if host_slots:
        arena = KVArena(num_layers=1, num_slots=slots, kv_planes=2, head_dim=1, dtype=torch.float32)
        parts["host"] = HostTier(pool, arena, (0,), host_slots)
    if shares:
        cache = PrefixCache(pool, cut_every or 2)
        evicts = retention is not None
        parts["sharing"] = PrefixSharing(cache, pool, lambda _: "all alike", evicts=evicts)
    if policy == StaticBatchScheduler.name:
        return Simulation(StaticBatchScheduler(**parts, batch_size=batch_size), retention)
    return Simulation(POLICIES[policy](**parts), retention)
