"""Reads a run folder and names the usual troubles, each with its cure. Loads no model."""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenrouter.tasks.common import Job
from tokenrouter.tasks.doctor_rules import RULES
from tokenrouter.tasks.doctor_run import LEVELS, FinishedRun, Level, read_run

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A rule that applies.

    Attributes:
        rule: its name.
        level: how bad it is.
        seen: the numbers that say so.
        why: it matters.
        cure: what to do, overrides in backticks.
    """

    rule: str
    level: Level
    seen: str
    why: str
    cure: str

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return asdict(self)


def run(job: Job) -> None:
    """``task=doctor``: prints the findings and writes doctor.json into its own folder.

    Raises:
        ValueError: ``run`` is missing or no run folder.
    """
    path = job.cfg.run
    if path is None:
        raise ValueError(
            "task=doctor needs the folder of a run: add run=outputs/runs/<date>/<time>, or "
            "run=outputs/sweeps/<date>/<time>/<job>"
        )
    if job.cfg.log_decisions:
        log.warning("log_decisions=true has no effect with task=doctor, which decides nothing")
    finished = read_run(Path(str(path)))
    findings = examine(finished)
    print(f"\n{format_findings(finished, findings)}")
    job.folder.write_json(
        "doctor.json",
        {
            "run": str(finished.path),
            "status": finished.status.get("status"),
            "findings": [finding.as_dict() for finding in findings],
        },
    )


def examine(finished: FinishedRun) -> list[Finding]:
    """Every rule that applies, the worst first."""
    findings = [
        Finding(rule=rule.name, level=seen.level, seen=seen.text, why=rule.why, cure=rule.cure)
        for rule in RULES
        if (seen := rule.check(finished)) is not None
    ]
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def format_findings(finished: FinishedRun, findings: list[Finding]) -> str:
    """The findings as text; a run without any is called healthy."""
    status = finished.status
    lines = [f"{finished.path}: {status.get('job', 'run')} ({status.get('status', 'no status')})"]
    for finding in findings:
        lines += [
            "",
            f"{finding.level}: {finding.rule}",
            f"  seen: {finding.seen}",
            f"  why:  {finding.why}.",
            f"  cure: {finding.cure}.",
        ]
    if not findings:
        lines += ["", f"Healthy: none of {len(RULES)} rules applies."]
    elif all(finding.level == "note" for finding in findings):
        lines += ["", "Healthy, but for these notes."]
    return "\n".join(lines) + "\n"
