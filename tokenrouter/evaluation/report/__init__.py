"""One page of many runs: what they chose beside all_high, then each run as its folder tells it."""

from tokenrouter.evaluation.report.gather import Gathered, LeftOut, ReportedRun, find_runs, gather
from tokenrouter.evaluation.report.joined import Joined, join
from tokenrouter.evaluation.report.page import html_page

__all__ = [
    "Gathered",
    "Joined",
    "LeftOut",
    "ReportedRun",
    "find_runs",
    "gather",
    "html_page",
    "join",
]
