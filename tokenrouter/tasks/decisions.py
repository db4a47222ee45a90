"""Writes an engine's decision log into a run folder."""

import logging
from pathlib import Path

from tokenrouter import LLM
from tokenrouter.telemetry import DecisionLog, write_decisions

log = logging.getLogger(__name__)


def write_log(llm: LLM, folder: Path) -> None:
    """Write ``decisions.parquet``: every decision that ``llm`` took so far.

    Args:
        llm: an engine with ``EngineOptions.log_decisions``.
        folder: the run folder.
    """
    recorder, path = llm.engine.decisions, folder / "decisions.parquet"
    assert recorder is not None, "the engine logs no decisions"
    decisions = DecisionLog(
        blocks=recorder.blocks,
        request_ids=recorder.request_ids,
        route_names=llm.engine.stats.route_names,
        reasons=recorder.reasons,
        router=llm.router.name,
        router_version=llm.router.version,
    )
    log.info("%d decisions in %s", write_decisions(path, decisions), path)
