"""By the caller's priority."""

from tokenrouter.scheduler.continuous import ContinuousScheduler
from tokenrouter.scheduler.request import Request


class PriorityScheduler(ContinuousScheduler):
    """By ``Request.priority``, lower first, then by arrival; the least urgent running request is preempted first.

    As vLLM's ``scheduling_policy=priority``, with aging: nobody waits for ever. A waiting request takes no seat from a
    running one, however urgent it is.
    """

    name = "priority"
    heeds_priority = True

    def rank(self, request: Request) -> int:
        """The caller's number."""
        return request.priority
