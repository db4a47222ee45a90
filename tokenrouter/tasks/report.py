"""Joins finished runs on one page that needs nothing else. Loads no model."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra.utils import instantiate

from tokenrouter.evaluation.report import Gathered, find_runs, gather, html_page, join
from tokenrouter.tasks.common import Job
from tokenrouter.wording import counted, writable

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    """``report`` of conf/task/report.

    Attributes:
        runs: folders of runs, folders with runs at any depth, or patterns of either.

    Raises:
        ValueError: none, or what is no path.
    """

    runs: Sequence[str] | str | None = None

    def __post_init__(self) -> None:
        given = [self.runs] if isinstance(self.runs, str) else self.runs
        if not given:
            raise ValueError(
                'task=report needs the folders of runs: add "report.runs=[outputs/runs/<date>/<time>,'
                'outputs/sweeps/<date>/<time>]"; a folder may hold several, and * stands for any name'
            )
        if not isinstance(given, list | tuple) or not all(isinstance(p, str) and p for p in given):
            raise ValueError(f"report.runs must be a list of folders, got {self.runs!r}")

    @property
    def paths(self) -> list[str]:
        """What was given, as a list."""
        return [self.runs] if isinstance(self.runs, str) else list(self.runs or ())


def run(job: Job) -> None:
    """``task=report``: writes report.html, and report.json with what is on it and what was left out.

    Raises:
        ValueError: no run is given, none is there, or none can be read.
    """
    options: ReportOptions = instantiate(job.cfg.report, _convert_="object")
    if job.cfg.log_decisions:
        log.warning("log_decisions=true has no effect with task=report, which decides nothing")
    gathered = gather(find_runs(options.paths, skip=job.folder.path))
    path = job.folder.write_text("report.html", html_page(gathered, join(gathered.runs)))
    job.folder.write_json("report.json", _summary(gathered))
    for each in gathered.left_out:
        log.warning("left out: %s %s", each.path, each.reason)
    log.info("%s in %s", counted(len(gathered.runs), "run"), path)


def _summary(gathered: Gathered) -> Mapping[str, Sequence[Mapping[str, object]]]:
    runs = [
        {
            "number": each.number,
            "path": writable(str(each.run.path)),
            "job": writable(each.name),
        }
        for each in gathered.runs
    ]
    left_out = [
        {"path": writable(str(each.path)), "reason": writable(each.reason)}
        for each in gathered.left_out
    ]
    return {"runs": runs, "left_out": left_out}
