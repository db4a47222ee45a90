"""Quality of all systems."""

from tokenrouter.tasks.common import Job
from tokenrouter.tasks.compare import compare


def run(job: Job) -> None:
    """``task=evaluate``."""
    compare(job, serve=False, score=True)
