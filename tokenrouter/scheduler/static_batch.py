"""Static batching, the baseline: whole requests in, whole requests out."""

from tokenrouter.kvcache import KVPool
from tokenrouter.scheduler.fcfs import FCFSScheduler
from tokenrouter.scheduler.request import Request


class StaticBatchScheduler(FCFSScheduler):
    """Admits ``batch_size`` requests when none is left, and frees a batch's slots when its last request is done.

    Execution stays free of padding and uses the same kernels, so the difference to FCFS is the scheduling alone.

    Args:
        pool, max_num_seqs, max_num_batched_tokens: see Scheduler.
        batch_size: requests of a batch, 1 to ``max_num_seqs``.
    """

    def __init__(
        self, *, pool: KVPool, max_num_seqs: int, max_num_batched_tokens: int, batch_size: int
    ) -> None:
        super().__init__(
            pool=pool, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
        if not 1 <= batch_size <= max_num_seqs:
            raise ValueError(
                f"batch_size {batch_size} must lie in 1 .. max_num_seqs {max_num_seqs}"
            )
        self.batch_size = batch_size
        self._open = True

    def finish(self, request: Request) -> None:
        """See Scheduler. The slots of a finished request stay taken until its whole batch is finished."""
        request.finished = True
        if request in self.waiting:
            self.waiting.remove(request)
        if all(r.finished for r in self.running):
            for done in list(self.running):
                super().finish(done)

    def _victim(self) -> Request:
        return next(request for request in reversed(self.running) if not request.finished)

    def _make_room(
        self, request: Request, length: int, lengths: dict[Request, int], preempted: list[Request]
    ) -> bool:
        if self.pool.free < length:
            for done in [r for r in self.running if r.finished]:
                super().finish(done)
        return super()._make_room(request, length, lengths, preempted)

    def _may_admit(self) -> bool:
        if not self.running:
            self._open = True
        if len(self.running) >= self.batch_size or not self.waiting:
            self._open = False
        return self._open and super()._may_admit()

    def _admit(self, budget: int, lengths: dict[Request, int]) -> None:
        super()._admit(budget, lengths)
        # A batch closes once decoding starts, also when the pool or the budget held it below its size.
        if any(request.num_computed >= request.prompt_len for request in self.running):
            self._open = False
