"""Labels of the very windows that task=evaluate measures, as router=oracle reads them."""

from dataclasses import dataclass
from pathlib import Path

import torch
from hydra.utils import instantiate

from tokenrouter.evaluation.progress import progress
from tokenrouter.kernels import select
from tokenrouter.routers.oracle import save_labels
from tokenrouter.tasks import build, checks
from tokenrouter.tasks.common import Job
from tokenrouter.tasks.prepare import quality_settings
from tokenrouter.telemetry import collect_provenance
from tokenrouter.training.labels import LabelMaker
from tokenrouter.training.oracle import labels_of
from tokenrouter.workloads import windows


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleFile:
    """``oracle`` of conf/task/collect_oracle.

    Attributes:
        path: of the file of labels; None: ``oracle.safetensors`` in the run folder.

    Raises:
        ValueError: a path whose folder does not exist, or that does not end in ``.safetensors``.
    """

    path: str | None = None

    def __post_init__(self) -> None:
        if self.path is None:
            return
        path = Path(self.path)
        if path.suffix != ".safetensors":
            raise ValueError(f"oracle.path={self.path} must end in .safetensors: rename it")
        if not path.parent.is_dir():
            raise ValueError(f"oracle.path={self.path}: there is no folder {path.parent}: make it")


def run(job: Job) -> None:
    """``task=collect_oracle``."""
    cfg = job.cfg
    options: OracleFile = instantiate(cfg.oracle, _convert_="object")
    maker: LabelMaker = instantiate(cfg.labels, _convert_="object")
    if maker.kind != "precision":
        raise ValueError(
            f"labels={maker.name} says how long an entry is needed, and router=oracle chooses between precisions: "
            "take a precision label, e.g. labels=fisher"
        )
    settings, source = quality_settings(cfg), instantiate(cfg.data)
    spec, sides = instantiate(cfg.executor), build.split_documents(source.documents())
    with progress("set-up", 2, unit="stages") as advance:
        model = build.load(cfg, "float32")
        checks.check_windows(settings.window_tokens, model.config.max_model_len, None)
        advance("model")
        text = build.encode_text(source.name, sides.evaluation, model.tokenizer)
        texts = windows(text.ids, settings.window_tokens, settings.num_windows)
        advance("text")
    provenance = collect_provenance(
        seed=cfg.seed,
        model=model.name,
        model_hash=model.model_hash,
        extra={"text": text.name, "text_hash": text.hash, "label": maker.name},
    )
    job.folder.write_json("provenance.json", provenance.as_dict())
    with progress("labels", len(texts), unit="windows") as advance:
        labels = labels_of(
            texts,
            model=model,
            spec=spec,
            maker=maker,
            seed=cfg.seed,
            on_done=lambda _: advance(text.name),
            kernels=select(cfg.kernels.backend, dtype=torch.float32),
        )
    path = Path(options.path or job.folder.path / "oracle.safetensors")
    known = [label_NC.nan_to_num(nan=0.0) for label_NC in labels]  # a window that does not tell
    save_labels(path, texts, known, label=maker.name)
    summary = {"num_tokens": sum(map(len, texts)), "num_windows": len(texts), "path": str(path)}
    job.folder.write_json("collected.json", summary)
    job.run.log_metrics({"collect": summary})
    print(
        f"\n{summary['num_tokens']:,} tokens labelled by {maker.name}: route them by task=evaluate router=oracle "
        f"router.path={path}, with the same model, executor, data and evaluation"
    )
