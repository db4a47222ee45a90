"""Static batching, the baseline: whole requests in, whole requests out."""

from tokenrouter.checks import check_integer
from tokenrouter.kvcache import HostTier, KVPool
from tokenrouter.scheduler.draft import Draft
from tokenrouter.scheduler.fcfs import FCFSScheduler
from tokenrouter.scheduler.limits import SchedulerLimits
from tokenrouter.scheduler.request import Request
from tokenrouter.scheduler.sharing import PrefixSharing


class StaticBatchScheduler(FCFSScheduler):
    """Admits ``batch_size`` requests when none is left, and frees a batch's slots when its last request is done.

    Execution stays free of padding and uses the same kernels, so the difference to FCFS is the scheduling alone.

    Args:
        pool, limits, cut_every, host, sharing: see Scheduler.
        batch_size: requests of a batch, 1 to ``max_num_seqs``.

    Raises:
        ValueError: ``batch_size`` is no integer, or out of range.
    """

    name = "static_batch"

    def __init__(
        self,
        *,
        pool: KVPool,
        limits: SchedulerLimits,
        batch_size: int,
        cut_every: int | None = None,
        host: HostTier | None = None,
        sharing: PrefixSharing | None = None,
    ) -> None:
        super().__init__(pool=pool, limits=limits, cut_every=cut_every, host=host, sharing=sharing)
        check_integer("batch_size", batch_size)
        if not 1 <= batch_size <= limits.max_num_seqs:
            raise ValueError(
                f"batch_size {batch_size} must lie in 1 .. max_num_seqs {limits.max_num_seqs}"
            )
        self.batch_size = batch_size
        self._open = True

    def finish(self, request: Request) -> None:
        """See Scheduler. The slots of a finished request stay taken until its whole batch is finished."""
        request.finished, self._steady = True, None
        if request in self.waiting:
            super().finish(request)
        if all(r.finished for r in self.running):
            for done in list(self.running):
                super().finish(done)

    def _make_room(self, request: Request, length: int, draft: Draft) -> bool:
        if self.pool.available < length:
            for done in [r for r in self.running if r.finished]:
                super().finish(done)
        return super()._make_room(request, length, draft)

    def _may_admit(self) -> bool:
        if not self.running:
            self._open = True
        if (
            not self.waiting
            or len(self.running) >= self.batch_size
            or any(map(_has_decoded, self.running))
        ):
            self._open = False
        return self._open and super()._may_admit()


def _has_decoded(request: Request) -> bool:
    """A batch closes once decoding started, also when the pool or the budget held it below its size."""
    return request.finished or request.num_computed > request.prompt_len
