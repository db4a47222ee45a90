"""Guards constructors that the command line fills: what is no value of an option is refused by the option's name.

Options and their types are read from the classes: a new option that is not checked fails here.
"""

from collections.abc import Iterator
from dataclasses import fields
from math import inf, nan
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tests.tasks.jobs import ROOT, compose_config, run_in
from tokenrouter import EngineOptions, SamplingParams
from tokenrouter.evaluation.quality import QualitySettings
from tokenrouter.evaluation.retrieval.settings import RetrievalSettings
from tokenrouter.evaluation.slo import SLOOptions
from tokenrouter.kvcache import KVPool, retention
from tokenrouter.kvcache.retention import (
    Budget,
    Full,
    RetentionOptions,
    RetentionPolicy,
    ScoredPolicy,
)
from tokenrouter.scheduler import SchedulerLimits, StaticBatchScheduler
from tokenrouter.tasks import build
from tokenrouter.tasks.bisect import run as bisect
from tokenrouter.tasks.checks import check_config
from tokenrouter.types import SparseAttention
from tokenrouter.workloads import (
    AzureTrace,
    GammaRequests,
    LengthMix,
    MooncakeTrace,
    PoissonRequests,
    RequestKind,
    RequestSpec,
    SeedMix,
    UniformRequests,
)
from tokenrouter.workloads.base import greedy

POLICIES: list[Any] = [
    value
    for value in vars(retention).values()
    if isinstance(value, type)
    and issubclass(value, RetentionPolicy)
    and value not in (RetentionPolicy, ScoredPolicy)
]
RANGES = {"prompt_min": 5, "prompt_max": 9, "output_min": 2, "output_max": 9}
RATE = {"num_requests": 3, "rate_requests_s": 2.0}
TRACE = {"data_dir": "data", "file": "trace", "num_requests": 3}
NEEDED: dict[Any, dict[str, Any]] = {
    **{policy: {} for policy in POLICIES},
    Budget: {},
    SparseAttention: {},
    RetentionOptions: {"policy": Full()},
    SchedulerLimits: {"max_num_seqs": 2, "max_num_batched_tokens": 8},
    EngineOptions: {},
    QualitySettings: {
        "window_tokens": 8,
        "num_windows": 2,
        "decode_tokens": 2,
        "decode_windows": 1,
    },
    SLOOptions: {},
    RetrievalSettings: {
        "tasks": ["passkey"],
        "lengths": [256],
        "depths": [0.5],
        "num_examples": 1,
    },
    LengthMix: {"prompt_lengths": [5], "output_min": 2, "output_max": 9},
    UniformRequests: {"num_requests": 3, "prompt_tokens": 5, "output_tokens": 5},
    PoissonRequests: RATE | RANGES,
    GammaRequests: RATE | RANGES | {"cv": 3.0},
    RequestKind: RANGES | {"name": "chat", "share": 1.0},
    SeedMix: RATE | {"kinds": [RequestKind(name="chat", share=1.0, **RANGES)]},
    AzureTrace: TRACE,
    MooncakeTrace: TRACE,
}
TEXTS = ("data_dir", "file", "name")
WRONG = (None, "half", True, nan, inf, 1.5, 2.0)


def wrong_values(made: Any, name: str) -> list[Any]:
    """Those of WRONG that the type of an option rules out; NaN and infinity always."""
    hint = get_type_hints(made)[name]
    kinds = {hint, *get_args(hint)}
    right = [
        value
        for value in WRONG
        if (value is None and NoneType in kinds)
        or (value is True and bool in kinds)
        or (value in (1.5, 2.0) and float in kinds)
        or (value == "half" and name in TEXTS)
    ]
    return [value for value in WRONG if not any(value is one for one in right)]


@pytest.mark.parametrize("made", NEEDED, ids=lambda made: made.__name__)
def test_what_is_no_value_of_an_option_is_refused_by_name(made: Any) -> None:
    """TypeError: '<=' not supported between instances of 'float' and 'str', in the middle of a job."""
    made(**NEEDED[made])
    for option in fields(made):
        for value in wrong_values(made, option.name) if option.init else ():
            with pytest.raises(ValueError, match=option.name) as refused:
                made(**NEEDED[made] | {option.name: value})
            assert repr(value) in str(refused.value), (option.name, value)


@pytest.mark.parametrize("size", [None, "half", True, nan, inf, 1.5, 0, 9])
def test_a_batch_is_a_number_of_requests(size: Any) -> None:
    """TypeError from a comparison, or half a request."""
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=8)
    with pytest.raises(ValueError, match=r"^batch_size "):
        StaticBatchScheduler(
            pool=KVPool(num_slots=8, max_rows=8, max_len=8), limits=limits, batch_size=size
        )


@pytest.mark.parametrize(
    "override",
    [
        "kvcache.retention.policy.evicted_frac=half",
        "kvcache.retention.policy.evicted_frac=null",
        "kvcache.retention.decay=x",
        "kvcache.retention.layers=all",
        "kvcache.retention.policy=null",
        "kvcache.retention=half",
        "scheduler.max_num_seqs=null",
        "scheduler.min_batch=few",
        "kvcache.prefix_sharing=maybe",
        "workload.prompt_lengths=5",
        "workload.prompt_lengths=[abc]",
        "workload.output_min=2.5",
        "workload.seed=null",
        "evaluation.window_tokens=long",
        "seed=one",
        "num_threads=0",
        "objective=3",
        "num_threads=all",
    ],
)
def test_a_command_line_hears_which_option_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    """A traceback, or a refusal when the model was loaded already."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(build, "load", load)
    path = override.partition("=")[0]
    with pytest.raises(Exception, match=path.rpartition(".")[2]) as refused:
        run_in(tmp_path, "debug=tiny", "kvcache=heavy_hitter", override)
    assert isinstance(refused.value.__cause__ or refused.value, ValueError)


def test_a_flag_is_no_number() -> None:
    """True taken for one pass, or for a logit."""
    with pytest.raises(ValueError, match=r"evaluation\.num_repeats must be at least 1 .* True"):
        check_config(compose_config("debug=tiny", "evaluation.num_repeats=true"))
    with pytest.raises(ValueError, match=r"task\.near_tie_logits must be 0 or more .* True"):
        bisect(_Nothing(), near_tie_logits=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "option", "value"),
    [
        (UniformRequests, "gap_s", -0.1),
        (UniformRequests, "gap_s", 1e300),
        (UniformRequests, "rate_scale", 1e-300),
        (UniformRequests, "length_scale", 1e300),
        (GammaRequests, "cv", 1e-300),
        (GammaRequests, "rate_requests_s", 0.0),
        (LengthMix, "prompt_lengths", [nan]),
        (LengthMix, "prompt_lengths", [1.5]),
        (LengthMix, "prompt_lengths", [2**53 + 1]),
        (SeedMix, "kinds", ["chat"]),
    ],
)
def test_a_value_that_no_arithmetic_holds_is_refused_by_name(
    made: Any, option: str, value: Any
) -> None:
    """ZeroDivisionError, OverflowError or a wait for ever when everything was served."""
    with pytest.raises(ValueError, match=option):
        made(**NEEDED[made] | {option: value})


@pytest.mark.parametrize("arrival_s", [nan, inf, -1.0, 1e10, "soon", True, None])
def test_a_request_arrives_at_some_time(arrival_s: Any) -> None:
    """An engine that steps for ever, because NaN never comes; a clock that reads seconds it has no digits for."""
    with pytest.raises(ValueError, match=r"^arrival_s=.* of 0 to 1e\+09"):
        RequestSpec(prompt_ids=(1,), params=greedy(1), arrival_s=arrival_s)


def test_arrivals_that_together_are_too_late_are_refused_before_a_model() -> None:
    """rate_scale and gap_s, each of a usable size: ZeroDivisionError in a rate after everything was served."""
    late = UniformRequests(**NEEDED[UniformRequests] | {"gap_s": 1e9, "rate_scale": 1e-9})
    with pytest.raises(
        ValueError, match=r"arrive after 2e\+18 s.*raise workload\.rate_scale=1e-09"
    ):
        late.check()


def _flags(node: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of what is true or false in a config file."""
    for key, value in node.items() if isinstance(node, dict) else ():
        if isinstance(value, bool) and not key.startswith("_"):
            yield f"{path}{key}"
        yield from _flags(value, f"{path}{key}.")


def _read(file: str | Path) -> Any:
    return OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / file))


def _all_flags() -> Iterator[tuple[str, ...]]:
    """For each flag of conf/ the overrides that bring it in, its path last."""
    for path in _flags(_read("config.yaml")):
        yield ("task=generate", path)
    for file in sorted((ROOT / "conf").glob("*/*.yaml")):
        group = file.parent.name
        prefix = "" if "@package _global_" in file.read_text() else f"{group}."
        added = "+" if group in ("labels", "trainer") else ""
        needed = ("train.data=x",) if file.stem == "train_retention" else ()
        for path in _flags(_read(file)) if group != "hydra" else ():
            yield (f"{added}{group}={file.stem}", *needed, prefix + path)


FLAGS = sorted(set(_all_flags()))


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag[-1])
def test_a_flag_is_true_or_false(flag: tuple[str, ...]) -> None:
    """log_decisions=no, which Hydra reads as a text, and every text counts as true."""
    *chosen, path = flag
    with pytest.raises(Exception, match=path.rpartition(".")[2]) as refused:
        cfg = compose_config(*chosen, f"{path}=no")
        check_config(cfg)
        build.engine_options(cfg)
        for part in ("explain", "train", "trainer", "labels", "router", "logger"):
            if part in cfg:
                instantiate(cfg[part], _convert_="object")
        if "sampling" in cfg:
            SamplingParams(**cfg.sampling)
    cause = refused.value.__cause__ or refused.value
    assert isinstance(cause, ValueError) and "'no'" in str(cause)


def test_all_flags_are_tried() -> None:
    """A walk over conf/ that finds none."""
    names = {path for *_, path in FLAGS}
    assert {"skip_finished", "logger.artifact"} <= names
    assert {"log_decisions", "chat", "sampling.ignore_eos", "kvcache.prefix_sharing"} <= names
    assert {"trainer.fast_dev_run", "train.fast_dev_run", "labels.per_layer"} <= names


class _Nothing:
    """A job that is refused before it is looked at."""

    cfg = None
