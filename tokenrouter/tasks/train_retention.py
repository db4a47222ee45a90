"""Trains the learned retention policy and writes it where ``kvcache.retention.policy.path`` finds it."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from hydra.utils import instantiate

from tokenrouter.evaluation.progress import progress
from tokenrouter.kvcache.retention import HeavyHitter, Learned, ScoredPolicy, SinkWindow
from tokenrouter.kvcache.retention.checkpoint import write_model
from tokenrouter.tasks.common import Job
from tokenrouter.tasks.curves import curve_loggers
from tokenrouter.telemetry import collect_provenance
from tokenrouter.training.retention.fit import RetentionTraining, fit, read_rows
from tokenrouter.training.retention.judge import lost_frac
from tokenrouter.training.retention.store import SumsStore

SHARES = (0.5, 0.75)
"""Of the tokens seen that are evicted when the trained policy is judged."""


def run(job: Job) -> None:
    """``task=train_retention``."""
    cfg = job.cfg
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    options: RetentionTraining = instantiate(cfg.train, _convert_="object")
    with progress("training", 3, unit="stages") as advance:
        rows = read_rows(options)
        advance("data")
        facts = rows.facts
        job.folder.write_json(
            "provenance.json",
            collect_provenance(
                seed=cfg.seed,
                model=facts["model"],
                model_hash=facts["model_hash"],
                extra={"data_set": options.data},
            ).as_dict(),
        )
        loggers = curve_loggers(job)
        trained = fit(rows, options, folder=job.folder.path, loggers=loggers, seed=cfg.seed)
        advance("policy")
        how = {k: v for k, v in asdict(options).items() if k not in ("data", "path")}
        about = {
            "data": facts,
            "train": how,
            "num_rows": {"train": len(rows.train.label_R), "valid": len(rows.valid.label_R)},
            "seed": cfg.seed,
        }
        target = Path(options.path or job.folder.path / "retention.json")
        path = write_model(replace(trained, about=about), target)
        valid = _judge(path, options)
        advance("export")
    summary = {"version": trained.version, "path": str(path), "valid_lost_frac": valid}
    job.folder.write_json("trained.json", summary)
    job.run.log_metrics({"trained": summary})
    _print_summary(valid, path)


def _judge(path: Path, options: RetentionTraining) -> dict[str, dict[str, float]]:
    """By policy and share, what is lost on the validation windows."""
    windows = SumsStore(options.data).load("valid")
    found: dict[str, dict[str, float]] = {}
    for share in SHARES:
        policies: list[ScoredPolicy] = [
            Learned(path=str(path), evicted_frac=share),
            HeavyHitter(evicted_frac=share),
            SinkWindow(evicted_frac=share),
        ]
        for policy in policies:
            lost = lost_frac(policy, windows, sinks=options.sinks, recent=options.recent)
            found.setdefault(policy.name, {})[f"{share:g}"] = lost
    return found


def _print_summary(valid: Mapping[str, Mapping[str, float]], path: Path) -> None:
    print("\nvalidation windows: share evicted, and what lay on evicted entries of what was needed")
    for name, by_share in valid.items():
        for share, lost in by_share.items():
            print(f"  {name:>12} {float(share):4.0%}  {lost:.4f}")
    print(f"written to {path}: use it by kvcache=learned kvcache.retention.policy.path={path}")
