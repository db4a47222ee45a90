"""The main job: quality and throughput of all systems, with the trade-off plot."""

from tokenrouter.tasks.common import Job
from tokenrouter.tasks.compare import compare


def run(job: Job) -> None:
    """``task=tradeoff``."""
    compare(job, serve=True, score=True)
