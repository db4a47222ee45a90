"""First come, first served.

Continuous batching (Orca, Yu et al. 2022), chunked prefill (Sarathi-Serve, Agrawal et al. 2024, arXiv:2403.02310) and
preemption by recompute (vLLM, Kwon et al. 2023, arXiv:2309.06180).
"""

from tokenrouter.scheduler.base import Chunk, Scheduler, StepPlan
from tokenrouter.scheduler.request import Request


class FCFSScheduler(Scheduler):
    """Running requests first (decode tokens, then prefill chunks, oldest first), then new ones while budget lasts.

    A new request is admitted when the pool can hold all tokens it has now. When a running one finds no slot, the
    youngest running request is preempted: its slots are freed at once, it goes to the head of the queue, and its
    tokens are recomputed later with their recorded decisions.
    """

    def schedule(self) -> StepPlan:
        """See Scheduler."""
        budget = self.max_num_batched_tokens
        lengths: dict[Request, int] = {}
        preempted: list[Request] = []
        for request in sorted(self.running, key=lambda r: r.num_uncomputed > 1):
            if request.row < 0 or request.finished:
                continue
            length = min(request.num_uncomputed, budget)
            if length and self._make_room(request, length, lengths, preempted):
                lengths[request] = length
                budget -= length
        if not preempted:
            self._admit(budget, lengths)
        chunks = tuple(Chunk(request=r, start=r.num_computed, length=n) for r, n in lengths.items())
        return StepPlan(chunks=chunks, preempted=tuple(preempted))

    def finish(self, request: Request) -> None:
        """See Scheduler."""
        if request in self.running:
            self.running.remove(request)
            self.pool.release(request.row)
            request.row = -1
        elif request in self.waiting:
            self.waiting.remove(request)

    def _make_room(
        self, request: Request, length: int, lengths: dict[Request, int], preempted: list[Request]
    ) -> bool:
        """Slots for the request's next ``length`` tokens, preempting younger requests as needed."""
        while not self.pool.extend(request.row, request.num_computed + length):
            victim = self._victim()
            self._preempt(victim)
            preempted.append(victim)
            lengths.pop(victim, None)
            if victim is request:
                return False
        return True

    def _victim(self) -> Request:
        return self.running[-1]

    def _preempt(self, victim: Request) -> None:
        self.running.remove(victim)
        self.pool.release(victim.row)
        victim.row, victim.num_computed, victim.waited_steps = -1, 0, 0
        victim.num_preemptions += 1
        victim.start_waiting()
        self.waiting.appendleft(victim)

    def _may_admit(self) -> bool:
        return (
            bool(self.waiting)
            and len(self.running) < self.max_num_seqs
            and self.pool.num_free_rows > 0
        )

    def _admit(self, budget: int, lengths: dict[Request, int]) -> None:
        while budget and self._may_admit() and self.waiting[0].num_tokens <= self.pool.free:
            request = self.waiting.popleft()
            request.row = self.pool.acquire_row(request.max_total)
            length = min(request.num_uncomputed, budget)
            extended = self.pool.extend(request.row, length)
            assert extended, "the pool refused slots it had counted as free"
            self.running.append(request)
            lengths[request] = length
            budget -= length
