"""Trains the learned retention policy on a data set of task=collect_retention.

R rows, F features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from tokenrouter.checks import check_count, check_flag, check_number
from tokenrouter.kvcache.retention.checkpoint import RetentionModel
from tokenrouter.kvcache.retention.entry_features import ENTRY_FEATURES
from tokenrouter.training.retention.module import MONITORED, RetentionModule
from tokenrouter.training.retention.rows import LABELS, Label, Rows, make_rows
from tokenrouter.training.retention.store import SumsStore
from tokenrouter.training.stopping import fit_best


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionTraining:
    """``train`` of conf/task/train_retention.

    Attributes:
        data: folder of a data set of task=collect_retention.
        path: of the trained policy's json file; None: ``retention.json`` in the run folder.
        label: ``needed`` (what later queries lose without the entry) or ``received`` (the attention that they give it).
        horizon: tokens after a decision that count.
        every: decisions from one to the next that is learned from.
        sinks, recent: entries that are never judged, as in the schedule.
        hidden: units.
        power: of the label, over 0 and at most 1.
        max_epochs: over the training rows.
        patience: epochs without a better validation loss before training stops.
        batch_size: rows.
        learning_rate: of Adam.
        fast_dev_run: one batch of training and of validation, to see that it runs.

    Raises:
        ValueError: an unknown label, a number out of range, or a flag that is none.
    """

    data: str
    path: str | None = None
    label: Label = "needed"
    horizon: int = 2048
    every: int = 1
    sinks: int = 4
    recent: int = 32
    hidden: int = 32
    power: float = 0.5
    max_epochs: int = 12
    patience: int = 4
    batch_size: int = 4096
    learning_rate: float = 0.005
    fast_dev_run: bool = False

    def __post_init__(self) -> None:
        if self.label not in LABELS:
            raise ValueError(f"train.label={self.label!r}; labels: {', '.join(LABELS)}")
        for name in (
            "horizon",
            "every",
            "recent",
            "hidden",
            "max_epochs",
            "patience",
            "batch_size",
        ):
            check_count(f"train.{name}", getattr(self, name), 1)
        check_count("train.sinks", self.sinks, 0)
        check_flag("train.fast_dev_run", self.fast_dev_run)
        check_number("train.power", self.power, lambda x: 0 < x <= 1, "over 0 and at most 1")
        check_number("train.learning_rate", self.learning_rate, lambda x: x > 0, "over 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionRows:
    """What is learned from and what training stops by.

    Attributes:
        facts: of the data set.
        train, valid: rows of different documents.
    """

    facts: dict[str, Any]
    train: Rows
    valid: Rows


def read_rows(options: RetentionTraining) -> RetentionRows:
    """The rows of a data set.

    Raises:
        ValueError: no data set, one that is empty or damaged, or whose labels do not differ.
    """
    store = SumsStore(options.data)
    facts = store.about

    def rows(split: str) -> Rows:
        made = make_rows(
            store.load(split),
            label=options.label,
            horizon=options.horizon,
            every=options.every,
            guarded=(options.sinks, options.recent),
        )
        if len(made.label_R) < 2 or float(made.label_R.min()) == float(made.label_R.max()):
            raise ValueError(
                f"{options.data}: the {len(made.label_R)} {split} rows have no labels that differ, so there is "
                "nothing to learn: collect more or longer windows with task=collect_retention"
            )
        return made

    return RetentionRows(facts=facts, train=rows("train"), valid=rows("valid"))


def fit(
    rows: RetentionRows,
    options: RetentionTraining,
    *,
    folder: Path,
    loggers: Sequence[Logger] = (),
    seed: int = 0,
) -> RetentionModel:
    """Trains on ``rows``, stopping where validation does not get better.

    Args:
        rows: of ``read_rows``.
        options: how.
        folder: gets ``checkpoints``.
        loggers: of losses.
        seed: of weights and batches. Equal seeds give equal policies.
    """
    module = RetentionModule(
        rows.train.values_RF,
        hidden=options.hidden,
        power=options.power,
        learning_rate=options.learning_rate,
        seed=seed,
    )
    fit_best(
        module,
        monitor=MONITORED,
        mode="min",
        max_epochs=options.max_epochs,
        patience=options.patience,
        fast_dev_run=options.fast_dev_run,
        folder=folder,
        loggers=loggers,
        train_dataloaders=_batches(rows.train, options, seed),
        val_dataloaders=_batches(rows.valid, options, seed),
    )
    return RetentionModel(
        features=ENTRY_FEATURES,
        model=rows.facts["model"],
        model_hash=rows.facts["model_hash"],
        tensors=module.tensors(),
    )


def _batches(rows: Rows, options: RetentionTraining, seed: int) -> DataLoader[Any]:
    """Shuffled; the order of validation rows changes no mean."""
    data = TensorDataset(*rows)
    order = RandomSampler(data, generator=torch.Generator().manual_seed(seed))
    batches = BatchSampler(order, options.batch_size, drop_last=False)
    return DataLoader(data, sampler=batches, batch_size=None)
