"""Labels and features of text as a data set to train routers on."""

import logging
import sys
from collections import Counter
from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from tokenrouter.evaluation.progress import progress
from tokenrouter.features import TokenTypeTable
from tokenrouter.kernels import select
from tokenrouter.models import LoadedModel
from tokenrouter.tasks import build
from tokenrouter.tasks.common import Job
from tokenrouter.telemetry import collect_provenance
from tokenrouter.training.collect import (
    CollectOptions,
    about,
    collect,
    folder_name,
    stored_features,
)
from tokenrouter.training.entropies import collect_entropies
from tokenrouter.training.gradients import DifferentiableDecoder
from tokenrouter.training.labels import LabelMaker
from tokenrouter.training.low_path import low_path
from tokenrouter.training.storage import LabelStore
from tokenrouter.training.windows import (
    Cut,
    Window,
    cut_windows,
    texts_by_name,
    unlabelled,
)
from tokenrouter.workloads import TextSource

log = logging.getLogger(__name__)


def run(job: Job) -> None:
    """``task=collect``."""
    cfg = job.cfg
    options: CollectOptions = instantiate(cfg.collect, _convert_="object")
    maker: LabelMaker = instantiate(cfg.labels, _convert_="object")
    spec = instantiate(cfg.executor)
    features = stored_features(options.features, options.after_layer)
    sources = sources_of(cfg, options)
    kernels = select(cfg.kernels.backend, dtype=torch.float32)
    with progress("set-up", 3, unit="stages") as advance:
        model = build.load(cfg, "float32")
        advance("model")
        cuts = {
            source.name: cut_source(source, model, options, len(sources), cfg.seed)
            for source in sources
        }
        advance("text")
        low = low_path(spec, model)
        decoder = DifferentiableDecoder(model, low, kernels)
        advance("low path")
    facts = about(
        maker=maker,
        decoder=decoder,
        low=low,
        features=features,
        options=options,
        texts={name: cut.hash for name, cut in cuts.items()},
        seed=cfg.seed,
    )
    store = LabelStore(options.path or Path(cfg.paths.output_dir) / "labels" / folder_name(facts))
    store.open(facts)
    provenance = collect_provenance(
        seed=cfg.seed,
        model=model.name,
        model_hash=model.model_hash,
        extra={
            "data_set": str(store.path.resolve()),
            "label": maker.name,
            "executor": low.executor,
        },
    ).as_dict()
    job.folder.write_json("provenance.json", provenance)
    store.write_json("provenance.json", provenance)
    windows = [window for cut in cuts.values() for window in cut.windows]
    counts = _collect(windows, store, maker, decoder, features, options.after_layer)
    summary = _summary(windows, counts) | {"path": str(store.path)}
    if maker.kind == "precision" and options.entropy_tokens:
        more = _unlabelled(sources, cuts, model, options, cfg.seed)
        summary["num_entropy_tokens"] = _collect_entropies(more, store, decoder)
    job.folder.write_json("collected.json", summary)
    job.run.log_metrics({"collect": summary})
    print(
        f"\n{summary['num_tokens']:,} tokens labelled by {maker.name} ({low.executor}) in {store.path}"
    )


def sources_of(cfg: DictConfig, options: CollectOptions) -> list[TextSource]:
    """The texts that ``collect.sources`` names, or the run's data."""
    if options.sources is None:
        return [instantiate(cfg.data)]
    return texts_by_name(options.texts, options.sources)


def cut_source(
    source: TextSource, model: LoadedModel, options: CollectOptions, num_sources: int, seed: int
) -> Cut:
    """A source's windows, with a warning where the text is too short."""
    if options.window_tokens > model.config.max_model_len:
        raise ValueError(
            f"collect.window_tokens={options.window_tokens} is longer than the model's length of "
            f"{model.config.max_model_len} tokens: lower it"
        )
    cut = cut_windows(
        source,
        build.encoder(model.tokenizer),
        window_tokens=options.window_tokens,
        num_tokens=-(-options.num_tokens // num_sources),
        seed=seed,
    )
    if cut.num_missing:
        log.warning(
            "%s gives %d windows of %d tokens, %d fewer than asked for: its calibration side is too short",
            source.name,
            len(cut.windows),
            options.window_tokens,
            cut.num_missing,
        )
    return cut


def _unlabelled(
    sources: list[TextSource],
    cuts: dict[str, Cut],
    model: LoadedModel,
    options: CollectOptions,
    seed: int,
) -> list[Window]:
    """Windows of the training side that get no labels, in equal parts of all sources."""
    found = []
    own = -(-options.entropy_tokens // len(sources))
    for source in sources:
        longer = cut_windows(
            source,
            build.encoder(model.tokenizer),
            window_tokens=options.window_tokens,
            num_tokens=options.num_tokens + 2 * own,  # some of them are for validation
            seed=seed,
        )
        found += unlabelled(cuts[source.name], longer, num_tokens=own)
    return found


def _collect(
    windows: list[Window],
    store: LabelStore,
    maker: LabelMaker,
    decoder: DifferentiableDecoder,
    features: tuple[str, ...],
    after_layer: int,
) -> Counter[bool]:
    """Makes what is missing; counts windows by whether they were there."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    counts: Counter[bool] = Counter()
    model = decoder.model
    with progress("labels", len(windows), unit="windows") as advance:

        def on_done(window: Window, was_there: bool) -> None:
            counts[was_there] += 1
            advance(window.name)

        collect(
            windows,
            store=store,
            maker=maker,
            decoder=decoder,
            features=features,
            token_types=TokenTypeTable.from_tokenizer(model.tokenizer, model.config.vocab_size),
            on_done=on_done,
            after_layer=after_layer,
        )
    return counts


def _collect_entropies(
    windows: list[Window], store: LabelStore, decoder: DifferentiableDecoder
) -> int:
    """Makes what is missing; the number of tokens."""
    with progress("entropies", len(windows), unit="windows") as advance:

        def on_done(window: Window, was_there: bool) -> None:
            advance(window.name)

        collect_entropies(windows, folder=store.path, decoder=decoder, on_done=on_done)
    return sum(len(window.ids_N) for window in windows)


def _summary(windows: list[Window], counts: Counter[bool]) -> dict[str, object]:
    tokens = Counter(f"{w.text}_{w.split}_tokens" for w in windows for _ in w.ids_N)
    return {
        "num_tokens": sum(tokens.values()),
        "new_windows": counts[False],
        "kept_windows": counts[True],
        **tokens,
    }
