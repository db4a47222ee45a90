"""Throughput and latency of all systems."""

from tokenrouter.tasks.common import Job
from tokenrouter.tasks.compare import compare


def run(job: Job) -> None:
    """``task=benchmark``."""
    compare(job, serve=True, score=False)
