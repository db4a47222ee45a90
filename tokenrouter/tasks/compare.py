"""Runs baselines and chosen router on the same requests and windows, and reports on them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tokenrouter import LLM
from tokenrouter.evaluation import plots
from tokenrouter.evaluation.generations import GenerationMatch, compare_served
from tokenrouter.evaluation.progress import progress
from tokenrouter.evaluation.quality import (
    Quality,
    QualityReport,
    measure_quality,
    request_level_quality,
)
from tokenrouter.evaluation.request_level import prompt_shares
from tokenrouter.evaluation.rows import SystemRow, make_row
from tokenrouter.evaluation.shares import route_shares
from tokenrouter.evaluation.slo import SLO, measure_slo
from tokenrouter.evaluation.systems import Systems
from tokenrouter.evaluation.throughput import (
    Throughput,
    measure_throughput,
)
from tokenrouter.executors import build_pool
from tokenrouter.models import LoadedModel
from tokenrouter.routers import RequestLevelRouter
from tokenrouter.tasks import accuracy, comparison_report, retrieval
from tokenrouter.tasks.common import Job
from tokenrouter.tasks.decisions import log_decisions
from tokenrouter.tasks.parts import Part
from tokenrouter.tasks.prepare import Setup, prepare
from tokenrouter.telemetry import RunFolder, collect_provenance


def compare(job: Job, *, serve: bool, score: bool) -> None:
    """Measure throughput (``serve``) and quality (``score``) of all systems, and report."""
    cfg = job.cfg
    setup = prepare(cfg, serve=serve, score=score)
    systems = setup.systems
    provenance = collect_provenance(
        seed=cfg.seed,
        model=setup.builder.model.name,
        model_hash=setup.builder.model.model_hash,
        extra={
            "text": setup.text.name,
            "text_hash": setup.text.hash,
            "executors": setup.builder.pool.description,
        },
    )
    job.folder.write_json("provenance.json", provenance.as_dict())
    served: dict[str, Throughput] = {}
    slo: SLO | None = None
    if serve:
        requests = setup.workload.requests
        slo = measure_slo(setup.slo, systems.llms["all_high"], requests)
        served = measure_throughput(systems.llms, requests, num_repeats=cfg.evaluation.num_repeats)
    texts = compare_texts(setup.builder.model, served)
    scored = measure(setup) if score else None
    parts = measure_parts(setup, job.folder)
    rows = make_rows(systems, served, scored, slo, texts)
    if cfg.log_decisions:
        log_decisions(
            setup.builder, systems.chosen_llm.router, setup.workload.requests, job.folder.path
        )
    if served:
        job.folder.write_steps(served[systems.chosen].repeats[-1].steps)
    notes = comparison_report.notes(cfg, setup, served, scored, provenance)
    table = comparison_report.write_tables(job.folder, rows.values(), notes, parts)
    drawn = draw(job.folder.path, rows, systems, served, caption=" \n".join(notes[-2:]))
    print(f"\n{table}")
    metrics = comparison_report.build_metrics(setup, rows, served, scored, slo, texts, parts)
    job.finish(metrics, drawn, {"systems": [row.as_dict() for row in rows.values()]})
    if served:
        job.run.log_steps(served[systems.chosen].repeats[-1].steps)


def compare_texts(
    model: LoadedModel, served: Mapping[str, Throughput]
) -> dict[str, GenerationMatch]:
    """What the systems generated beside all_high; nothing where nothing was served."""
    if not served:
        return {}
    return compare_served(served, model.tokenizer.decode, model.config.eos_token_ids)


def measure_parts(setup: Setup, folder: RunFolder) -> list[Part]:
    """What is asked for beside KL and throughput; each writes its own files."""
    parts = []
    if setup.tasks:
        answers = accuracy.measure_tasks(setup.tasks, setup.systems, setup.builder)
        parts.append(accuracy.report(folder, answers, setup.systems))
    if setup.questions:
        found = retrieval.measure(setup.questions, setup.systems)
        parts.append(retrieval.report(folder, setup.questions, found, setup.systems.chosen))
    return parts


def measure(setup: Setup) -> QualityReport:
    """Quality of every system; all_high's and all_low's give request_level's and static_batch's."""
    systems = setup.systems
    assert setup.reference is not None and setup.settings is not None
    assert setup.reference_kernels is not None
    reference = LLM(
        setup.reference,
        executors=build_pool("full", setup.reference, kernels=setup.reference_kernels),
        options=replace(setup.builder.plain_options, dispatch="mixed").without_ignored(),
    )
    measured = measure_quality(reference, systems.scored, setup.windows, setup.settings)
    qualities: dict[str, Quality] = dict(measured.systems)
    qualities |= request_level_qualities(systems, qualities, setup.windows)
    if "static_batch" in systems.llms:
        qualities["static_batch"] = qualities["all_high"]
    return replace(measured, systems=qualities)


def request_level_qualities(
    systems: Systems, measured: Mapping[str, Quality], texts: list[list[int]]
) -> dict[str, Quality]:
    """By name those that are computed: request_level's, and the chosen one's where that is it with memory options.

    Args:
        systems: with what was measured.
        measured: of each of ``systems.scored``.
        texts: the windows.
    """
    router = systems.ranking_router
    if router is None:
        return {}
    is_chosen = isinstance(systems.chosen_llm.router, RequestLevelRouter)
    target = router.high_frac if is_chosen else measured[systems.chosen].high_frac
    assert target is not None
    shares = prompt_shares(router, systems.chosen_llm.token_types, texts)
    memory = systems.chosen.removeprefix(router.name) if is_chosen else ""
    return {
        f"{router.name}{ending}": request_level_quality(
            measured[f"all_high{ending}"], measured[f"all_low{ending}"], shares, target
        )
        for ending in dict.fromkeys(("", memory))
    }


def make_rows(
    systems: Systems,
    served: Mapping[str, Throughput],
    scored: QualityReport | None,
    slo: SLO | None,
    texts: Mapping[str, GenerationMatch],
) -> dict[str, SystemRow]:
    """One row per system, baselines first, the chosen router last unless it is a baseline."""
    qualities = scored.systems if scored else {}
    names = ["all_high", "all_low", "request_level", "static_batch", systems.chosen]
    return {
        name: make_row(
            name,
            chosen=name == systems.chosen,
            throughput=served.get(name),
            slo=slo,
            match=texts.get(name),
            quality=qualities.get(name),
            reference_ppl=scored.reference.ppl if scored else None,
        )
        for name in dict.fromkeys(names)
        if name in systems.llms or name in qualities
    }


def draw(
    folder: Path,
    rows: Mapping[str, SystemRow],
    systems: Systems,
    served: Mapping[str, Throughput],
    *,
    caption: str,
) -> list[Path]:
    """The plots that the measurements allow."""
    if not served:
        return []
    last, names = served[systems.chosen].repeats[-1], systems.chosen_llm.engine.stats.route_names
    shares = route_shares(last.outputs, names, systems.chosen_llm.token_types)
    has_loss = any(row.kl_mean_nats is not None for row in rows.values())
    drawn = []
    with progress("plots", 1 + has_loss, unit="figures") as advance:
        if has_loss:
            tradeoff = plots.plot_tradeoff(list(rows.values()), folder / "tradeoff.png", caption)
            drawn.append(tradeoff)
            advance(tradeoff.name)
        drawn.append(plots.plot_routes(shares, names, folder / "routes.png"))
        advance(drawn[-1].name)
    return drawn
