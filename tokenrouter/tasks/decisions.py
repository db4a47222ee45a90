"""Writes decision logs into a run folder."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from tokenrouter import LLM
from tokenrouter.evaluation.progress import progress
from tokenrouter.evaluation.systems import SystemsBuilder
from tokenrouter.evaluation.throughput import num_tokens, run_requests
from tokenrouter.routers import Router
from tokenrouter.telemetry import DecisionLog, write_decisions
from tokenrouter.workloads import RequestSpec

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


def log_decisions(
    builder: SystemsBuilder, router: Router, requests: Sequence[RequestSpec], folder: Path
) -> None:
    """One more pass of ``router`` over ``requests``, with the log on, so that it slows no measured pass."""
    llm = builder.llm(router, replace(builder.options, log_decisions=True))
    with progress("decision log", num_tokens(requests), unit="tokens") as advance:
        run_requests(llm, requests, partial(advance, router.name))
    write_log(llm, folder)
