"""Which requests and tokens run in a step. ``POLICIES`` has the classes by the names of conf/scheduler."""

from tokenrouter.scheduler.base import QueueFullError, Scheduler, StepPlan
from tokenrouter.scheduler.continuous import ContinuousScheduler
from tokenrouter.scheduler.fcfs import FCFSScheduler
from tokenrouter.scheduler.limits import PhaseOrder, SchedulerLimits
from tokenrouter.scheduler.priority import PriorityScheduler
from tokenrouter.scheduler.request import UNDECIDED, Request, RequestDecision
from tokenrouter.scheduler.sharing import PrefixSharing
from tokenrouter.scheduler.shortest_first import ShortestFirstScheduler
from tokenrouter.scheduler.static_batch import StaticBatchScheduler
from tokenrouter.scheduler.token_rows import TokenRows

POLICIES: dict[str, type[ContinuousScheduler]] = {
    "fcfs": FCFSScheduler,
    "static_batch": StaticBatchScheduler,
    "priority": PriorityScheduler,
    "shortest_first": ShortestFirstScheduler,
}

__all__ = [
    "POLICIES",
    "UNDECIDED",
    "ContinuousScheduler",
    "FCFSScheduler",
    "PhaseOrder",
    "PrefixSharing",
    "PriorityScheduler",
    "QueueFullError",
    "Request",
    "RequestDecision",
    "Scheduler",
    "SchedulerLimits",
    "ShortestFirstScheduler",
    "StaticBatchScheduler",
    "StepPlan",
    "TokenRows",
]
