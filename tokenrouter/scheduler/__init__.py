"""Which requests and tokens run in a step."""

from tokenrouter.scheduler.base import Chunk, Scheduler, StepPlan
from tokenrouter.scheduler.fcfs import FCFSScheduler
from tokenrouter.scheduler.request import UNDECIDED, Request, RequestDecision
from tokenrouter.scheduler.static_batch import StaticBatchScheduler

__all__ = [
    "UNDECIDED",
    "Chunk",
    "FCFSScheduler",
    "Request",
    "RequestDecision",
    "Scheduler",
    "StaticBatchScheduler",
    "StepPlan",
]
