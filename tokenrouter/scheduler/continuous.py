"""Continuous batching, what all policies share.

Continuous batching (Orca, Yu et al. 2022), chunked prefill (Sarathi-Serve, Agrawal et al. 2024, arXiv:2403.02310) and
preemption by recompute (vLLM, Kwon et al. 2023, arXiv:2309.06180).
"""

import itertools
import logging
from abc import abstractmethod
from bisect import insort
from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tokenrouter.kvcache import HostTier, KVPool, Prefix
from tokenrouter.scheduler.base import Scheduler, StepPlan
from tokenrouter.scheduler.draft import Draft
from tokenrouter.scheduler.limits import SchedulerLimits
from tokenrouter.scheduler.request import Request
from tokenrouter.scheduler.sharing import PrefixSharing

log = logging.getLogger(__name__)


class ContinuousScheduler(Scheduler):
    """Decode tokens and chunks of running requests, then new requests while seats, budget and slots last.

    One order serves all choices: ``rank``, and among equals the earlier request first. Waiting requests are admitted
    in it, and none passes the first one where that does not fit; running ones get prompt tokens in it. When one finds
    no slot, the last running request in it is preempted: its slots are freed at once, it waits again, and its tokens
    are recomputed later with their recorded decisions.

    Aging: every time a later request is admitted while a request waits, or some run on while it is preempted, counts in
    its ``num_overtaken``. At ``limits.max_overtaken`` it goes before all that are not so far, in order of arrival: no
    request is passed more often.

    A decode token that finds no place in ``limits.max_decode_tokens`` waits for its turn: those run that were in a
    plan, or came in, longest ago. A running request without a token in the plan waits, and the time counts as its
    queue time.

    While the same requests decode, the last plan is moved on by a token, without a look at each of them.
    """

    name: ClassVar[str]
    heeds_priority: ClassVar[bool] = False

    def __init__(
        self,
        *,
        pool: KVPool,
        limits: SchedulerLimits,
        cut_every: int | None = None,
        host: HostTier | None = None,
        sharing: PrefixSharing | None = None,
    ) -> None:
        """See Scheduler."""
        super().__init__(pool=pool, limits=limits, cut_every=cut_every, host=host, sharing=sharing)
        self._numbers = itertools.count()
        self._num_turns = 0
        self._stood_back_steps = 0
        self._steady: StepPlan | None = None
        self._has_warned = False

    @abstractmethod
    def rank(self, request: Request) -> int:
        """Lower goes first. May change while the request runs, never while it waits."""

    def add(self, request: Request) -> None:
        """See Scheduler."""
        if request.priority and not self.heeds_priority and not self._has_warned:
            self._has_warned = True
            log.warning(
                "request %s has priority %d, which scheduler %s ignores: choose scheduler=priority",
                request.request_id,
                request.priority,
                self.name,
            )
        request.number = next(self._numbers)
        insort(self.waiting, request, key=self._order)

    def finish(self, request: Request) -> None:
        """See Scheduler."""
        self._steady = None
        if request in self.running:
            self.running.remove(request)
            self.pool.release(request.row)
            self.tokens.leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            if request.swapped is not None and self.host is not None:
                self.host.drop(request.swapped)
                request.swapped = None

    def schedule(self) -> StepPlan:
        """See Scheduler; the phase that stands back runs where the first one finds nothing to run."""
        plan = self._move_on() or self._plan_step()
        self.tokens.state_R["last_turn"][plan.row_C] = self._turns(len(plan.row_C))
        return plan

    def _turns(self, count: int) -> NDArray[np.int64]:
        """The next numbers of turns."""
        self._num_turns += count
        return np.arange(self._num_turns - count, self._num_turns)

    def _move_on(self) -> StepPlan | None:
        """The last plan again, where all that run are in it with a token each, and nobody can join."""
        plan = self._steady
        if plan is None or (self.waiting and not self._seats_are_taken()):
            return None
        start_C = self.tokens.state_R["num_computed"][plan.row_C]
        if not self.pool.extend_all(plan.row_C, start_C + 1):
            return None
        return replace(plan, start_C=start_C, num_shared_tokens=0)

    def _seats_are_taken(self) -> bool:
        return self.limits.phase_order == "mixed" and not self._may_admit()

    def _plan_step(self) -> StepPlan:
        unfinished = self._unfinished()
        decoding = [request for request in unfinished if request.decoding]
        prompts = [request for request in unfinished if not request.decoding]
        is_due = self._stood_back_steps >= self.limits.max_phase_wait_steps
        phase_order = "mixed" if is_due else self.limits.phase_order
        draft = Draft(self.limits, is_mixed=phase_order == "mixed")
        if phase_order == "prefill_first":
            self._plan_prompts(prompts, draft)
            if not draft.ran(decoding=False):  # none, or a decode token from the host tier
                self._plan_decode(decoding, draft)
        else:
            self._plan_decode(decoding, draft)
            if phase_order == "mixed" or not draft.lengths:
                self._plan_prompts(prompts, draft)
        self._count_standing_back(draft, decoding, prompts)
        unfinished = self._unfinished()
        for request in unfinished:
            if request not in draft.lengths:
                request.start_waiting()
        plan = draft.plan()
        is_steady = len(plan.requests) == len(unfinished) and not draft.ran(decoding=False)
        self._steady = plan if is_steady and not plan.preempted else None
        return plan

    def _order(self, request: Request) -> tuple[bool, int, int]:
        is_due = request.num_overtaken >= self.limits.max_overtaken
        return (not is_due, 0 if is_due else self.rank(request), request.number)

    def _unfinished(self) -> list[Request]:
        return [request for request in self.running if not request.finished]

    def _count_standing_back(
        self, draft: Draft, decoding: list[Request], prompts: list[Request]
    ) -> None:
        """How many steps in a row the phase that stands back has had something to run, and ran nothing."""
        decode_stands_back = self.limits.phase_order == "prefill_first"
        waits = decoding if decode_stands_back else (prompts or self.waiting)
        if draft.ran(decoding=decode_stands_back) or not waits:
            self._stood_back_steps = 0
        else:
            self._stood_back_steps += 1

    def _plan_decode(self, decoding: list[Request], draft: Draft) -> None:
        most = draft.left(decoding=True)
        if len(decoding) > most:
            turns = sorted(decoding, key=lambda request: request.last_turn)[:most]
        else:
            turns = sorted(decoding, key=self._order)
        if not self._plan_all(turns, draft):
            for request in turns:
                self._plan(request, draft)

    def _plan_all(self, decoding: list[Request], draft: Draft) -> bool:
        """One token for each, where there are slots for all; else False, and nothing is planned."""
        row_B = np.array([request.row for request in decoding], np.int64)
        length_B = np.array([request.num_computed + 1 for request in decoding], np.int64)
        if not self.pool.extend_all(row_B, length_B):
            return False
        for request in decoding:
            draft.take(request, 1)
        return True

    def _plan_prompts(self, prompts: list[Request], draft: Draft) -> None:
        for request in sorted(prompts, key=self._order):
            self._plan(request, draft)
        if not draft.preempted:
            self._admit(draft)

    def _plan(self, request: Request, draft: Draft) -> None:
        """Chooses what the budget and the slots allow; the request may have been preempted for an earlier one."""
        if request.row >= 0:
            length = self._length(request, draft)
            if length and self._make_room(request, length, draft):
                draft.take(request, length)

    def _length(self, request: Request, draft: Draft) -> int:
        length = min(request.num_uncomputed, draft.left(decoding=request.decoding))
        if self.cut_every is None:
            return length
        return min(length, self.cut_every - request.num_computed % self.cut_every)

    def _fits(self, request: Request, prefix: Prefix | None) -> bool:
        """Whether the pool has room for a waiting request: for what it will hold of all tokens that it has now.

        What others use of its prefix costs nothing.
        """
        wanted = self.pool.slots_for(request.num_tokens)
        if request.swapped is not None:  # more than that where a decision of the policy failed
            next_tokens = min(request.num_uncomputed, self.cut_every or request.num_uncomputed)
            wanted = max(wanted, request.swapped.num_entries + next_tokens)
        return self.pool.has_room(wanted, prefix)

    def _make_room(self, request: Request, length: int, draft: Draft) -> bool:
        """Slots for the request's next ``length`` tokens, preempting requests behind it as needed."""
        while not self.pool.extend(request.row, request.num_computed + length):
            victim = max(self._unfinished(), key=self._order)
            draft.drop(victim)
            self._preempt(victim)
            insort(self.waiting, victim, key=self._order)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        self.running.remove(victim)
        if self.host is not None and victim.num_computed:
            victim.swapped = self.host.swap_out(victim.row, victim.num_computed)
        if victim.swapped is None:
            self.pool.release(victim.row)
            victim.num_computed = 0
        self.tokens.leave(victim)
        victim.waited_steps = 0
        victim.num_preemptions += 1
        victim.num_overtaken += any(r.number > victim.number for r in self._unfinished())
        victim.start_waiting()

    def _may_admit(self) -> bool:
        return (
            bool(self.waiting)
            and len(self.running) < self.max_num_seqs
            and self.pool.num_free_rows > 0
        )

    def _admit(self, draft: Draft) -> None:
        while self._may_admit() and draft.left(decoding=False):
            request = self.waiting[0]
            if not draft.may_join(request):
                return
            prefix = self.sharing.find(request) if self.sharing is not None else None
            if not self._fits(request, prefix):
                return
            self.waiting.remove(request)
            self.tokens.enter(request, self.pool.acquire_row(request.max_total))
            if request.swapped is not None and self.host is not None:
                self.host.swap_in(request.swapped, request.row)
                request.swapped = None
            elif self.sharing is not None:
                draft.num_shared_tokens += self.sharing.start(request, prefix)
            length = self._length(request, draft)
            extended = self.pool.extend(request.row, request.num_computed + length)
            assert extended, "the pool refused slots it had counted as available"
            self.running.append(request)
            request.last_turn = int(self._turns(1)[0])  # behind those that wait for theirs
            if length:
                draft.take(request, length)
            self._count_overtaken(request)

    def _count_overtaken(self, admitted: Request) -> None:
        passed = [request for request in self.waiting if request.number < admitted.number]
        for request in passed:
            request.num_overtaken += 1
        if any(request.num_overtaken == self.limits.max_overtaken for request in passed):
            self.waiting.sort(key=self._order)
