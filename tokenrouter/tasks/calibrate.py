"""From a share of high tokens, or a KL, to the thresholds of a learned router, in a file for ``router.thresholds``."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from tokenrouter import LLM, EngineOptions
from tokenrouter.checks import check_count
from tokenrouter.evaluation.held_out import HeldOutWindows
from tokenrouter.evaluation.progress import progress
from tokenrouter.evaluation.quality import QualitySettings, measure_quality
from tokenrouter.executors import ExecutorPool, build_pool
from tokenrouter.features import (
    TokenTypeTable,
    feature_specs,
    needs_signals,
    sequence_batch,
)
from tokenrouter.kernels import select
from tokenrouter.models import LoadedModel
from tokenrouter.routers import Budget, LearnedRouter, Router
from tokenrouter.routers.budget import check_frac
from tokenrouter.routers.learned import CALIBRATED
from tokenrouter.routers.thresholds import write_thresholds
from tokenrouter.tasks import build
from tokenrouter.tasks.common import Job
from tokenrouter.tasks.prepare import held_out_windows, quality_settings
from tokenrouter.telemetry import collect_provenance
from tokenrouter.types import Phase
from tokenrouter.workloads import windows

CLOSE = 0.02
"""A KL within this part of its target is met."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateOptions:
    """``calibrate`` of conf/task/calibrate.

    Attributes:
        high_frac: share of high work in each phase, as the router's budget; None where ``kl_nats`` is given.
        kl_nats: mean KL of forced prefill that is to be kept with as little high work as possible.
        num_windows: of each side of the text on which KL is measured.
        max_steps: of the bisection.
        path: of the file; None: ``thresholds.json`` in the run folder.

    Raises:
        ValueError: no target or two, or a number out of range.
    """

    high_frac: float | None = None
    kl_nats: float | None = None
    num_windows: int = 2
    max_steps: int = 7
    path: str | None = None

    def __post_init__(self) -> None:
        if (self.high_frac is None) == (self.kl_nats is None):
            raise ValueError(
                f"calibrate takes one target, got high_frac={self.high_frac} and kl_nats={self.kl_nats}: set one, "
                "and the other to null"
            )
        if self.high_frac is not None:
            check_frac("calibrate.high_frac", self.high_frac)
        if self.kl_nats is not None and not 0 < self.kl_nats < float("inf"):
            raise ValueError(f"calibrate.kl_nats={self.kl_nats} must be a number above 0")
        check_count("calibrate.num_windows", self.num_windows, 1)
        check_count("calibrate.max_steps", self.max_steps, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sides:
    """What thresholds are set on, and what they are judged on: windows of both sides of a text."""

    types: TokenTypeTable
    calibration: HeldOutWindows
    evaluation: HeldOutWindows

    def calibrated(self, router: LearnedRouter, high_frac: float) -> LearnedRouter:
        """A copy of ``router`` with thresholds for a share."""
        fresh = copy.deepcopy(router)
        fresh.set_budget(Budget(high_frac=high_frac))
        calibrated = self.calibration.calibrated(fresh, self.types)
        assert isinstance(calibrated, LearnedRouter)
        return calibrated


def run(job: Job) -> None:
    """``task=calibrate``."""
    cfg = job.cfg
    options: CalibrateOptions = instantiate(cfg.calibrate, _convert_="object")
    router, spec, source = instantiate(cfg.router), instantiate(cfg.executor), instantiate(cfg.data)
    router = _learned(router)
    settings, documents = quality_settings(cfg), build.split_documents(source.documents())
    with progress("set-up", 3, unit="stages") as advance:
        reference = build.load(cfg, cfg.evaluation.reference_dtype)
        model = reference.astype(cfg.model.dtype)
        advance("model")
        pool = build_pool(spec, model, kernels=cfg.kernels.backend)
        router.use_for(model=model.name, model_hash=model.model_hash, low=pool.low_name)
        router.use_kernels(pool.kernels)
        advance("executors")
        texts = [build.encode_text(source.name, side, model.tokenizer) for side in documents]
        sides = Sides(
            types=TokenTypeTable.from_tokenizer(model.tokenizer, model.config.vocab_size),
            calibration=held_out_windows(texts[0], settings),
            evaluation=held_out_windows(texts[1], settings),
        )
        advance("text")
    job.folder.write_json("provenance.json", _provenance(cfg, model, pool))
    kl: dict[str, float] = {}
    if options.kl_nats is None:
        assert options.high_frac is not None
        chosen = sides.calibrated(router, options.high_frac)
    else:
        measure = KLMeasure.of(cfg, reference, model, pool, options)
        chosen, kl = _for_kl(router, sides, measure, options)
    achieved = achieved_shares(chosen, sides)
    about = {
        "asked": {"high_frac": options.high_frac, "kl_nats": options.kl_nats},
        "budget_high_frac": chosen.budget.high_frac,
        "achieved_high_frac": achieved,
        "kl_mean_nats": kl,
        "text": source.name,
        "executor": pool.description,
        "window_tokens": settings.window_tokens,
    }
    path = Path(options.path or job.folder.path / "thresholds.json")
    has_groups = chosen.layer_groups is not None
    write_thresholds(path, chosen.artifact.version, chosen.thresholds, about, has_groups=has_groups)
    job.folder.write_json("calibrated.json", about)
    job.run.log_metrics({"calibration": about})
    _print_summary(about, router.name, path)


def achieved_shares(router: Router, sides: Sides) -> dict[str, dict[str, float]]:
    """Share of high work by side and phase, of what is decided, on windows as quality is measured on."""
    found = {}
    for name, side in (("calibration", sides.calibration), ("evaluation", sides.evaluation)):
        extractor = router.extractor(sides.types)
        counts: dict[str, list[float]] = {}
        for row, ids in enumerate(side.passages()):
            for phase, prompt_len in _phases(len(ids), side.decode_tokens):
                batch = sequence_batch(ids, prompt_len=prompt_len, row=row, token_types=sides.types)
                batch = batch.select((batch.phase_T == phase).nonzero().flatten())
                high_T = router.high_work(router.route(extractor.extract(batch)).route_T)
                count = counts.setdefault(phase.name.lower(), [0.0, 0])
                count[0] += float(high_T.sum())
                count[1] += len(high_T)
        found[name] = {phase: high / total for phase, (high, total) in counts.items()}
    return found


def _phases(num_tokens: int, decode_tokens: int) -> list[tuple[Phase, int]]:
    """Each phase, and the prompt's length in it."""
    both = [(Phase.PREFILL, num_tokens)]
    return both + ([(Phase.DECODE, num_tokens - decode_tokens)] if decode_tokens else [])


@dataclass(frozen=True, kw_only=True, slots=True)
class KLMeasure:
    """Mean KL to the reference in forced prefill, as task=evaluate measures it."""

    reference: LLM
    model: LoadedModel
    pool: ExecutorPool
    settings: QualitySettings

    @classmethod
    def of(
        cls,
        cfg: DictConfig,
        reference: LoadedModel,
        model: LoadedModel,
        pool: ExecutorPool,
        options: CalibrateOptions,
    ) -> "KLMeasure":
        """With the run's windows, as many as ``options`` say, and no decode."""
        kernels = select(cfg.kernels.backend, dtype=reference.dtype)
        settings = replace(
            quality_settings(cfg),
            num_windows=options.num_windows,
            decode_tokens=0,
            decode_windows=0,
        )
        engine_options = EngineOptions(dispatch="mixed").without_ignored()
        llm = LLM(
            reference,
            executors=build_pool("full", reference, kernels=kernels),
            options=engine_options,
        )
        return cls(reference=llm, model=model, pool=pool, settings=settings)

    def kl_nats(self, routers: list[LearnedRouter], side: HeldOutWindows) -> list[float]:
        """Of each router, on the same windows of a side."""
        options = EngineOptions(dispatch="mixed").without_ignored()
        llms = {
            str(index): LLM(self.model, router=router, executors=self.pool, options=options)
            for index, router in enumerate(routers)
        }
        cut = windows(side.text_ids, self.settings.window_tokens, self.settings.num_windows)
        report = measure_quality(self.reference, llms, cut, self.settings)
        return [float(report.systems[name].prefill.kl_nats.mean()) for name in llms]


def _for_kl(
    router: LearnedRouter, sides: Sides, measure: KLMeasure, options: CalibrateOptions
) -> tuple[LearnedRouter, dict[str, float]]:
    """The router with the least share that keeps the KL, and its KL on both sides."""
    assert options.kl_nats is not None

    def kl_of(share: float) -> float:
        return measure.kl_nats([sides.calibrated(router, share)], sides.calibration)[0]

    share = least_share(kl_of, options.kl_nats, max_steps=options.max_steps)
    chosen = sides.calibrated(router, share)
    return chosen, {
        "calibration": measure.kl_nats([chosen], sides.calibration)[0],
        "evaluation": measure.kl_nats([chosen], sides.evaluation)[0],
    }


def least_share(kl_of: Callable[[float], float], target: float, *, max_steps: int) -> float:
    """The least share of high work whose KL is at most ``target``, by bisection.

    Args:
        kl_of: mean KL in nats of a share; falls as the share grows.
        target: in nats.
        max_steps: after the two ends were measured.

    Raises:
        ValueError: not even all high has a KL of at most ``target``.
    """
    if (kl_low := kl_of(0.0)) <= target:
        return 0.0
    if (kl_high := kl_of(1.0)) > target:
        raise ValueError(
            f"calibrate.kl_nats={target:g} cannot be reached: all high has {kl_high:.5f} nats on the calibration "
            f"side, and all low {kl_low:.5f}; choose a value between"
        )
    too_few, enough = 0.0, 1.0
    for _ in range(max_steps):
        middle = (too_few + enough) / 2
        kl = kl_of(middle)
        too_few, enough = (middle, enough) if kl > target else (too_few, middle)
        if (1 - CLOSE) * target <= kl <= target:
            break
    return enough


def _learned(router: Router) -> LearnedRouter:
    if not isinstance(router, LearnedRouter):
        raise ValueError(
            f"task=calibrate sets the thresholds of a learned router, and {router.name} is none: set router=mlp, "
            "linear or trees; other routers with a budget are calibrated when they start"
        )
    if router.thresholds_from != CALIBRATED:
        raise ValueError(
            f"router.thresholds={router.thresholds_from} are thresholds already: leave it at calibrated to set "
            "new ones"
        )
    if needs_signals(router.features):
        known_late = [spec.name for spec in feature_specs(router.features) if spec.needs_signals]
        raise ValueError(
            f"task=calibrate runs no engine, and router {router.name} looks at {', '.join(known_late)}, which only a "
            "running one knows: leave router.thresholds at calibrated, and they are set when an engine starts"
        )
    return router


def _provenance(cfg: DictConfig, model: LoadedModel, pool: ExecutorPool) -> dict[str, object]:
    return collect_provenance(
        seed=cfg.seed,
        model=model.name,
        model_hash=model.model_hash,
        extra={"executors": pool.description},
    ).as_dict()


def _print_summary(about: dict[str, object], name: str, path: Path) -> None:
    asked, achieved = about["asked"], about["achieved_high_frac"]
    assert isinstance(asked, dict) and isinstance(achieved, dict)
    target = (
        f"{asked['high_frac']:.1%} high"
        if asked["kl_nats"] is None
        else f"KL {asked['kl_nats']:g} nats"
    )
    print(f"\nasked: {target}; set on the calibration side: {about['budget_high_frac']:.1%} high")
    for side, shares in achieved.items():
        per_phase = ", ".join(f"{phase} {share:.1%}" for phase, share in shares.items())
        kl = about["kl_mean_nats"]
        assert isinstance(kl, dict)
        print(f"  {side:>11}: {per_phase}" + (f", KL {kl[side]:.5f} nats" if kl else ""))
    print(f"written to {path}: use it by router={name} router.thresholds={path}")
