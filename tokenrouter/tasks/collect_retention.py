"""What entries received and were needed for, in windows of text: what a retention policy is trained on."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate

from tokenrouter.checks import check_count
from tokenrouter.evaluation.progress import progress
from tokenrouter.kernels import select
from tokenrouter.kvcache.retention import Full, RetentionOptions
from tokenrouter.tasks import build
from tokenrouter.tasks.collect import cut_source, sources_of
from tokenrouter.tasks.common import Job
from tokenrouter.telemetry import collect_provenance
from tokenrouter.training.collect import CollectOptions, folder_name
from tokenrouter.training.gradients import DifferentiableDecoder
from tokenrouter.training.low_path import low_path
from tokenrouter.training.retention.store import SummedWindow, SumsStore
from tokenrouter.training.retention.sums import window_sums
from tokenrouter.training.windows import Window


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """``sums`` of conf/task/collect_retention.

    Attributes:
        interval: tokens from one decision of the policy to the next.
        groups: of neighbouring layers that keep their own entries.

    Raises:
        ValueError: a number that is no integer of at least 1.
    """

    interval: int = 128
    groups: int = 5

    def __post_init__(self) -> None:
        for name in ("interval", "groups"):
            check_count(f"sums.{name}", getattr(self, name), 1)


def run(job: Job) -> None:
    """``task=collect_retention``."""
    cfg = job.cfg
    options: CollectOptions = instantiate(cfg.collect, _convert_="object")
    sums: Sums = instantiate(cfg.sums, _convert_="object")
    if options.window_tokens < 2 * sums.interval:
        raise ValueError(
            f"collect.window_tokens={options.window_tokens} must be at least two intervals of "
            f"{sums.interval} tokens: what is learned is what one says of the next"
        )
    sources = sources_of(cfg, options)
    with progress("set-up", 2, unit="stages") as advance:
        model = build.load(cfg, "float32")
        low = low_path(instantiate(cfg.executor), model)
        decoder = DifferentiableDecoder(
            model, low, select(cfg.kernels.backend, dtype=torch.float32)
        )
        advance("model")
        cuts = {s.name: cut_source(s, model, options, len(sources), cfg.seed) for s in sources}
        advance("text")
    facts = {
        "label": "retention",
        "executor": "high",
        "model": model.name,
        "model_hash": model.model_hash,
        "window_tokens": options.window_tokens,
        "interval": sums.interval,
        "groups": sums.groups,
        "texts": {name: cut.hash for name, cut in cuts.items()},
        "seed": cfg.seed,
    }
    path = options.path or Path(cfg.paths.output_dir) / "labels" / folder_name(facts)
    store = SumsStore(path)
    store.open(facts)
    _provenance(job, store)
    windows = [window for cut in cuts.values() for window in cut.windows]
    summary = _collect(windows, store, decoder, sums)
    job.folder.write_json("collected.json", summary)
    job.run.log_metrics({"collect": summary})
    print(
        f"\n{summary['num_tokens']:,} tokens in {summary['path']}: learn from them by "
        f"task=train_retention train.data={summary['path']}"
    )


def _provenance(job: Job, store: SumsStore) -> None:
    about = store.about
    found = collect_provenance(
        seed=job.cfg.seed,
        model=about["model"],
        model_hash=about["model_hash"],
        extra={"data_set": str(store.path.resolve())},
    ).as_dict()
    job.folder.write_json("provenance.json", found)
    store.write_json("provenance.json", found)


def _collect(
    windows: list[Window], store: SumsStore, decoder: DifferentiableDecoder, sums: Sums
) -> dict[str, Any]:
    """Makes the windows that are missing; those too short for two intervals are left out."""
    options = RetentionOptions(policy=Full(), groups=sums.groups)
    layer_groups = options.layer_groups(decoder.config.num_layers)
    finished, counts = store.finished(), Counter[str]()
    with progress("sums", len(windows), unit="windows") as advance:
        for window in windows:
            num_tokens = len(window.ids_N) // sums.interval * sums.interval
            if num_tokens >= 2 * sums.interval:
                if window.name not in finished:
                    found = window_sums(
                        decoder,
                        window.ids_N,
                        layer_groups=layer_groups,
                        interval=sums.interval,
                        seed=window.seed,
                    )
                    ids_N = window.ids_N[:num_tokens]
                    store.write(window.name, SummedWindow(ids_N=ids_N, sums=found))
                counts["kept" if window.name in finished else "new"] += 1
                counts["tokens"] += num_tokens
            advance(window.name)
    return {
        "num_tokens": counts["tokens"],
        "new_windows": counts["new"],
        "kept_windows": counts["kept"],
        "path": str(store.path),
    }
