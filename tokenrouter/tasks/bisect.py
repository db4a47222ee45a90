"""Names the dimension that changes an output: everything off, then schedule, precision and memory on, one by one."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from tokenrouter.engine.memory import slots_for
from tokenrouter.evaluation.generations import first_difference
from tokenrouter.evaluation.memory_notes import memory_notes
from tokenrouter.evaluation.metrics import serving_sections
from tokenrouter.evaluation.progress import progress
from tokenrouter.evaluation.request_level import calibrate_on_requests
from tokenrouter.evaluation.systems import (
    SystemsBuilder,
    calibration_passages,
    pool_note,
    without_memory,
)
from tokenrouter.evaluation.throughput import num_tokens
from tokenrouter.executors import build_pool
from tokenrouter.features import TokenTypeTable
from tokenrouter.kernels import select
from tokenrouter.routers import RequestLevelRouter, Router
from tokenrouter.tasks import build, checks
from tokenrouter.tasks.bisect_differences import find_differences
from tokenrouter.tasks.bisect_report import Step, format_steps
from tokenrouter.tasks.bisect_systems import Served, System, make_systems, serve
from tokenrouter.tasks.common import Job
from tokenrouter.tasks.decisions import write_log
from tokenrouter.telemetry import Provenance, collect_provenance, peak_process_bytes
from tokenrouter.wording import counted

NEAR_TIE_LOGITS = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.25}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What is built before anything runs."""

    text: build.Text
    builder: SystemsBuilder
    router: Router


def run(job: Job, *, near_tie_logits: float | None = None) -> None:
    """``task=bisect``.

    Args:
        job: its config says what is on; the workload's requests are served once with everything off, and once more for
            each dimension that the config uses.
        near_tie_logits: two logits closer than this are a near-tie, where the order of a sum may decide; None: by the
            model's dtype, ``NEAR_TIE_LOGITS``.

    Raises:
        ValueError: ``near_tie_logits`` is negative or no finite number, or the config cannot run.
    """
    cfg = job.cfg
    _check(near_tie_logits)
    setup = prepare(cfg)
    builder = setup.builder
    dtype = str(builder.model.dtype).removeprefix("torch.")
    limit = NEAR_TIE_LOGITS[dtype] if near_tie_logits is None else float(near_tie_logits)
    provenance = collect_provenance(
        seed=cfg.seed,
        model=builder.model.name,
        model_hash=builder.model.model_hash,
        extra={
            "text": setup.text.name,
            "text_hash": setup.text.hash,
            "executors": builder.pool.description,
        },
    )
    job.folder.write_json("provenance.json", provenance.as_dict())
    systems = make_systems(setup.router, builder.pool, builder.options, builder.requests)
    steps, served = bisect(builder, systems, near_tie_logits=limit)
    notes = _notes(setup, served, provenance, limit)
    report = format_steps(steps, notes)
    job.folder.write_text("bisect.md", report)
    job.folder.write_json(
        "bisect.json",
        {"near_tie_logits": limit, "steps": [step.as_dict() for step in steps], "notes": notes},
    )
    job.folder.write_steps(served.repeat.steps)
    if cfg.log_decisions:
        write_log(served.llm, job.folder.path)
    print(f"\n{report}")
    memory = {"peak_process_bytes": peak_process_bytes()}
    job.finish({"memory": memory} | serving_sections(served.llm, [served.repeat]))


def prepare(cfg: DictConfig) -> Setup:
    """Build what the config says, cheap things first, so that a mistake shows before the model is loaded."""
    options, spec = build.engine_options(cfg), instantiate(cfg.executor)
    router, workload = instantiate(cfg.router), instantiate(cfg.workload)
    source = instantiate(cfg.data)
    workload.check()
    sides = build.split_documents(source.documents())
    select(cfg.kernels.backend)
    with progress("set-up", 3, unit="stages") as advance:
        model = build.load(cfg, cfg.model.dtype)
        advance("model")
        text = build.encode_text(source.name, sides.evaluation, model.tokenizer)
        held_out = build.encode_text(source.name, sides.calibration, model.tokenizer)
        requests = workload.build(
            build.encoder(model.tokenizer), text.ids, max_model_len=model.config.max_model_len
        ).requests
        checks.check_requests(
            [len(r.prompt_ids) + r.max_output_tokens for r in requests],
            options.num_kv_slots,
            slots_for(options.retention, router.routes(model.config.num_layers)),
        )
        advance("text")
        passages = calibration_passages(requests, held_out.ids, seed=cfg.seed)
        builder = SystemsBuilder(
            model=model,
            pool=build_pool(spec, model, kernels=cfg.kernels.backend),
            options=options,
            requests=requests,
            calibration_ids=passages,
        )
        if isinstance(router, RequestLevelRouter):
            types = TokenTypeTable.from_tokenizer(model.tokenizer, model.config.vocab_size)
            calibrate_on_requests(router, types, requests, passages)
        advance("executors")
    return Setup(text=text, builder=builder, router=router)


def _notes(setup: Setup, served: Served, provenance: Provenance, limit: float) -> list[str]:
    """What ran and where, and whether the retention policy did anything."""
    builder, router = setup.builder, setup.router
    dtype = str(builder.model.dtype).removeprefix("torch.")
    notes = [
        f"{counted(len(builder.requests), 'request')}, {served.repeat.output_tokens:,} greedy tokens out. Each "
        f"dimension is compared with the step above it; near-ties are gaps below {limit:g}.",
        f"{builder.model.name} ({dtype}); {builder.pool.description}; router {router.version}",
        f"{provenance.hardware_label}; torch {provenance.versions['torch']}; {provenance.commit_label}",
    ]
    plain = without_memory(builder.options, builder.requests)
    notes += pool_note(builder.options, plain, "the steps before memory have")
    if builder.options.retention is not None:
        notes += memory_notes(
            builder.options.retention, [served.repeat.stats], place="with everything on"
        )
    return notes


def bisect(
    builder: SystemsBuilder, systems: tuple[System, ...], *, near_tie_logits: float
) -> tuple[list[Step], Served]:
    """Serve the requests with each system and compare it with the one before.

    Args:
        builder: of the engines; its requests are served.
        systems: from everything off to everything on. One whose dimension is not used is not run.
        near_tie_logits: two logits closer than this are a near-tie.

    Returns:
        A step for each system but the first, and the pass of the last one that ran.

    Raises:
        ValueError: an engine refused a request.
    """
    steps: list[Step] = []
    first: Served | None = None
    total = num_tokens(builder.requests) * sum(system.is_used for system in systems)
    with progress("bisect", total, unit="tokens") as advance:
        for system in systems:
            name = system.dimension or "everything off"
            if system.is_used:
                llm = builder.llm(system.router, system.options, system.pool)
                served = serve(llm, builder.requests, partial(advance, name))
            if first is None:
                first = before = served
                continue
            assert system.dimension is not None
            found = find_differences(before, served, near_tie_logits=near_tie_logits)
            steps.append(
                Step(
                    dimension=system.dimension,
                    setting=system.setting,
                    is_used=system.is_used,
                    is_lossless=system.is_lossless,
                    num_requests=len(builder.requests),
                    differences=tuple(found),
                    num_changed_in_all=_num_changed(first, served),
                )
            )
            before = served
    return steps, served


def _num_changed(first: Served, served: Served) -> int:
    pairs: Any = zip(first.repeat.outputs, served.repeat.outputs, strict=True)
    return sum(
        first_difference(old.outputs[0].token_ids, new.outputs[0].token_ids) is not None
        for old, new in pairs
    )


def _check(near_tie_logits: float | None) -> None:
    if near_tie_logits is None:
        return
    is_number = isinstance(near_tie_logits, int | float) and not isinstance(near_tie_logits, bool)
    if not is_number or not 0 <= near_tie_logits < math.inf:
        defaults = ", ".join(f"{dtype}: {value:g}" for dtype, value in NEAR_TIE_LOGITS.items())
        raise ValueError(
            f"task.near_tie_logits must be 0 or more (a difference of two logits), or null for the default of the "
            f"model's dtype ({defaults}); got {near_tie_logits!r}"
        )
