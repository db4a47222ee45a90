"""Trains a router on a data set of task=collect and writes it where ``router.path`` finds it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from tokenrouter.evaluation.progress import progress
from tokenrouter.routers.artifact import write_artifact
from tokenrouter.tasks import build
from tokenrouter.tasks.common import Job
from tokenrouter.tasks.curves import curve_loggers
from tokenrouter.telemetry import collect_provenance
from tokenrouter.training.entropies import load_entropies
from tokenrouter.training.export import checked_groups, make_artifact
from tokenrouter.training.id_inputs import IdInputs, make_id_inputs
from tokenrouter.training.router_data import RouterData
from tokenrouter.training.storage import LabelStore
from tokenrouter.training.train import TrainOptions, train


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSource:
    """``train`` of conf/task/train_router.

    Attributes:
        data: folder of a data set of task=collect.
        layers: whose labels are added up; None: all.
        texts: names of sources in the data set to learn from; None: all.
        layer_groups: how many of like need may be decided about one by one, see ``checked_groups``; None: none.
        path: of the trained router's json file; None: ``router.json`` in the run folder.
    """

    data: str
    layers: Sequence[int] | None = None
    texts: Sequence[str] | None = None
    layer_groups: int | str | None = "auto"
    path: str | None = None


def run(job: Job) -> None:
    """``task=train_router``."""
    cfg = job.cfg
    source: TrainSource = instantiate(cfg.train, _convert_="object")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    options: TrainOptions = instantiate(cfg.trainer, _convert_="object")
    layers = None if source.layers is None else tuple(source.layers)
    with progress("training", 3, unit="stages") as advance:
        data = RouterData(
            source.data,
            features=options.features,
            layers=layers,
            texts=source.texts,
            batch_size=options.batch_size,
            min_id_count=options.min_id_count,
            seed=cfg.seed,
            id_inputs=_id_inputs(cfg, source) if options.id_numbers else None,
        )
        num_groups = checked_groups(source.layer_groups, data, options)
        advance("data")
        trained = train(
            data, options, folder=job.folder.path, loggers=curve_loggers(job), seed=cfg.seed
        )
        advance("router")
        provenance = collect_provenance(
            seed=cfg.seed,
            model=data.facts["model"],
            model_hash=data.facts["model_hash"],
            extra={"data_set": source.data, "executor": data.facts["executor"]},
        ).as_dict()
        job.folder.write_json("provenance.json", provenance)
        about = {
            "trainer": OmegaConf.to_container(cfg.trainer, resolve=True),
            "num_tokens": {"train": len(data.train), "valid": len(data.valid)},
            "seed": cfg.seed,
        }
        artifact = make_artifact(data, trained, layers=layers, about=about, num_groups=num_groups)
        path = write_artifact(artifact, Path(source.path or job.folder.path / "router.json"))
        advance("export")
    valid = artifact.about["valid"]
    summary = {"version": artifact.version, "path": str(path), "valid": valid}
    job.folder.write_json("trained.json", summary)
    job.run.log_metrics({"trained": summary})
    _print_summary(valid, path, artifact.kind)


def _id_inputs(cfg: DictConfig, source: TrainSource) -> IdInputs:
    """What the model's embedding and the data set's entropies tell of ids."""
    store = LabelStore(source.data)
    facts = store.about
    entropies = load_entropies(store.path, without=store.finished(), texts=source.texts)
    model = build.load(cfg, "float32")
    if model.model_hash != facts["model_hash"]:
        raise ValueError(
            f"{source.data} holds labels of the model {facts['model']} ({facts['model_hash']}), and model= is "
            f"{model.name} ({model.model_hash}), whose embedding trainer.id_numbers={cfg.trainer.id_numbers} looks "
            "at: choose that model, or set trainer.id_numbers=0"
        )
    return make_id_inputs(model.weights.embed_VE, entropies)


def _print_summary(valid: Mapping[str, Any], path: Path, kind: str) -> None:
    print(
        f"\nvalidation documents, {kind}: share high, AUROC, recall, gain over random of the labels' own"
    )
    for text, by_share in valid.items():
        for share, ranked in by_share.items():
            print(
                f"  {text:>12} {float(share):4.0%}  {ranked['auroc']:.3f}  {ranked['recall_frac']:.3f}  "
                f"{ranked['gain_frac']:.3f}"
            )
    print(f"written to {path}: use it by router={kind} router.path={path}")
