"""First come, first served."""

from tokenrouter.scheduler.continuous import ContinuousScheduler
from tokenrouter.scheduler.request import Request


class FCFSScheduler(ContinuousScheduler):
    """By arrival; the youngest running request is preempted first."""

    name = "fcfs"

    def rank(self, request: Request) -> int:
        """All alike, so arrival decides."""
        return 0
