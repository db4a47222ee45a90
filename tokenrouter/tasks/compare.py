"""Runs baselines and chosen router on the same requests and windows, and reports on them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from tokenrouter import LLM, EngineOptions
from tokenrouter.engine.memory import slots_for
from tokenrouter.evaluation import plots
from tokenrouter.evaluation.harness.runner import LoadedTasks
from tokenrouter.evaluation.held_out import HeldOutWindows
from tokenrouter.evaluation.progress import progress
from tokenrouter.evaluation.quality import (
    Quality,
    QualityReport,
    QualitySettings,
    measure_quality,
    request_level_quality,
)
from tokenrouter.evaluation.request_level import prompt_shares
from tokenrouter.evaluation.rows import SystemRow, make_row
from tokenrouter.evaluation.shares import route_shares
from tokenrouter.evaluation.slo import SLO, SLOOptions, measure_slo
from tokenrouter.evaluation.systems import Systems, SystemsBuilder, calibration_passages
from tokenrouter.evaluation.throughput import (
    Throughput,
    measure_throughput,
    num_tokens,
    run_requests,
)
from tokenrouter.executors import build_pool
from tokenrouter.kernels import KernelSet, select
from tokenrouter.models import LoadedModel
from tokenrouter.routers import RequestLevelRouter, Router
from tokenrouter.tasks import accuracy, build, checks, groups, report
from tokenrouter.tasks.common import Job
from tokenrouter.tasks.decisions import write_log
from tokenrouter.telemetry import collect_provenance
from tokenrouter.workloads import RequestSet, windows


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Everything that is built before anything is measured; the last four only to score."""

    text: build.Text
    windows: list[list[int]]
    workload: RequestSet
    slo: SLOOptions
    builder: SystemsBuilder
    systems: Systems
    reference: LoadedModel | None
    reference_kernels: KernelSet | None
    settings: QualitySettings | None
    tasks: LoadedTasks | None


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
    scored = measure(setup) if score else None
    tasks = accuracy.measure_tasks(setup.tasks, systems, setup.builder) if setup.tasks else None
    rows = make_rows(systems, served, scored, slo)
    if cfg.log_decisions:
        log_decisions(setup, job.folder.path)
    if served:
        job.folder.write_steps(served[systems.chosen].repeats[-1].steps)
    notes = report.notes(cfg, setup, served, scored, provenance)
    if tasks:
        accuracy.write_tasks(job.folder, tasks)
        notes = [*accuracy.task_notes(tasks), *notes]
    table = report.write_tables(job.folder, rows.values(), notes)
    drawn = draw(job.folder.path, rows, systems, served, caption=" \n".join(notes[-2:]))
    print(f"\n{table}")
    metrics = report.build_metrics(setup, rows, served, scored, slo, tasks)
    job.finish(metrics, drawn, {"systems": [row.as_dict() for row in rows.values()]})
    if served:
        job.run.log_steps(served[systems.chosen].repeats[-1].steps)


def prepare(cfg: DictConfig, *, serve: bool, score: bool) -> Setup:
    """Build what the config says, cheap things first, so that a mistake shows before the model is loaded."""
    options, spec = build.engine_options(cfg), instantiate(cfg.executor)
    router, workload = instantiate(cfg.router), instantiate(cfg.workload)
    source, slo = instantiate(cfg.data), instantiate(cfg.evaluation.slo)
    workload.check()
    sides = build.split_documents(source.documents())
    settings = quality_settings(cfg) if score else None
    tasks = accuracy.load_tasks(cfg) if score else None
    select(cfg.kernels.backend)
    with progress("set-up", 4, unit="stages") as advance:
        model = build.load(cfg, dtype=cfg.evaluation.reference_dtype if score else cfg.model.dtype)
        reference, model = (model if score else None), model.astype(cfg.model.dtype)
        kernels = select(cfg.kernels.backend, dtype=reference.dtype) if reference else None
        max_model_len = model.config.max_model_len
        advance("model")
        if settings:
            check_windows(settings, options, router, model)
        text = build.encode_text(source.name, sides.evaluation, model.tokenizer)
        held_out = build.encode_text(source.name, sides.calibration, model.tokenizer)
        encode = build.encoder(model.tokenizer)
        request_set = workload.build(encode, text.ids, max_model_len=max_model_len)
        requests = request_set.requests
        texts = windows(text.ids, settings.window_tokens, settings.num_windows) if settings else []
        advance("text")
        builder = SystemsBuilder(
            model=model,
            pool=build_pool(spec, model, kernels=cfg.kernels.backend),
            options=own_options(options) if serve else options,
            requests=requests,
            calibration_ids=calibration_passages(requests, held_out.ids, seed=cfg.seed),
            held_out=held_out_windows(held_out, settings) if settings else None,
            static_batch_size=options.static_batch_size if serve else None,
        )
        advance("executors")
        systems = builder.build(router, serve=serve)
        advance("systems")
    return Setup(
        text=text,
        windows=texts,
        workload=request_set,
        slo=slo,
        builder=builder,
        systems=systems,
        reference=reference,
        reference_kernels=kernels,
        settings=settings,
        tasks=tasks,
    )


def check_windows(
    settings: QualitySettings, options: EngineOptions, router: Router, model: LoadedModel
) -> None:
    """Refuse windows that the chosen router's engine does not take; the baselines' pool grows to hold them.

    Raises:
        ValueError: a window is longer than the model's length, or may hold more slots at once than the pool has.
    """
    needed = slots_for(options.retention, router.routes(model.config.num_layers))
    checks.check_windows(
        settings.window_tokens, model.config.max_model_len, options.num_kv_slots, needed
    )


def own_options(options: EngineOptions) -> EngineOptions:
    """Without the size of static batches where they are a baseline's alone: there it has an effect."""
    if options.scheduler == "static_batch":
        return options
    return replace(options, static_batch_size=None)


def held_out_windows(text: build.Text, settings: QualitySettings) -> HeldOutWindows:
    """Passages of ``text``, the calibration side, as forced prefill and decode see windows."""
    return HeldOutWindows(
        text_ids=text.ids,
        window_tokens=settings.window_tokens,
        decode_tokens=settings.decode_tokens if settings.decodes else 0,
    )


def quality_settings(cfg: DictConfig) -> QualitySettings:
    """conf/evaluation, the part about quality."""
    return QualitySettings(**{key: cfg.evaluation[key] for key in groups.QUALITY})


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


def log_decisions(setup: Setup, folder: Path) -> None:
    """One more pass of the chosen router, with the log on, so that it slows no measured pass."""
    builder = setup.builder
    router = setup.systems.chosen_llm.router
    llm = builder.llm(router, replace(builder.options, log_decisions=True))
    requests = setup.workload.requests
    total = num_tokens(requests)
    with progress("decision log", total, unit="tokens") as advance:
        run_requests(llm, requests, partial(advance, router.name))
    write_log(llm, folder)
