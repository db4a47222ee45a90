"""By what is left to do."""

from tokenrouter.scheduler.continuous import ContinuousScheduler
from tokenrouter.scheduler.request import Request


class ShortestFirstScheduler(ContinuousScheduler):
    """The request that needs the fewest tokens from here on first; the one that needs most is preempted first.

    Shortest remaining processing time (Schrage 1968), which gives the least mean time in the system where lengths are
    known. Here the output's length is not: a request counts with its upper bound, ``max_tokens`` (or the model's
    length), so one that ends early was placed too far back. See FastServe (Wu et al. 2023, arXiv:2305.05920).
    """

    name = "shortest_first"

    def rank(self, request: Request) -> int:
        """Prompt tokens to compute plus output tokens allowed."""
        return request.max_total - request.num_computed
