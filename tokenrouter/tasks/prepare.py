"""Builds everything that a comparison needs, and refuses what cannot run, before anything is measured."""

from dataclasses import dataclass, replace

from hydra.utils import instantiate
from omegaconf import DictConfig

from tokenrouter import EngineOptions
from tokenrouter.engine.memory import slots_for
from tokenrouter.evaluation.harness.runner import LoadedTasks
from tokenrouter.evaluation.held_out import HeldOutWindows
from tokenrouter.evaluation.progress import progress
from tokenrouter.evaluation.quality import (
    QualitySettings,
)
from tokenrouter.evaluation.slo import SLOOptions
from tokenrouter.evaluation.systems import Systems, SystemsBuilder, calibration_passages
from tokenrouter.executors import build_pool
from tokenrouter.kernels import KernelSet, select
from tokenrouter.models import LoadedModel
from tokenrouter.routers import Router
from tokenrouter.tasks import accuracy, build, checks, groups, retrieval
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
    questions: retrieval.Questions | None


def prepare(cfg: DictConfig, *, serve: bool, score: bool) -> Setup:
    """Build what the config says, cheap things first, so that a mistake shows before the model is loaded."""
    options, spec = build.engine_options(cfg), instantiate(cfg.executor)
    router, workload = instantiate(cfg.router), instantiate(cfg.workload)
    source, slo = instantiate(cfg.data), instantiate(cfg.evaluation.slo)
    workload.check()
    sides = build.split_documents(source.documents())
    settings = quality_settings(cfg) if score else None
    tasks = accuracy.load_tasks(cfg) if score else None
    asked = retrieval.load_settings(cfg) if score else None
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
        questions = retrieval.make_questions(
            asked, options, router, model, text_ids=text.ids, seed=cfg.seed
        )
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
            most_tokens=questions.max_tokens if questions else 0,
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
        questions=questions,
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
