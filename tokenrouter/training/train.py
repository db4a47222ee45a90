"""Trains a router of any kind: the same data, the same validation, one artifact.

N tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor

from tokenrouter.checks import check_flag
from tokenrouter.kernels import ReferenceKernels
from tokenrouter.routers.artifact import Kind
from tokenrouter.routers.lookup import Bins, router_table
from tokenrouter.routers.trees import import_lightgbm
from tokenrouter.training.losses import LOSSES, LossName, mean_gain
from tokenrouter.training.router_data import Examples, RouterData
from tokenrouter.training.router_module import MONITORED, RouterModule
from tokenrouter.training.router_tensors import router_tensors
from tokenrouter.training.stopping import fit_best


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """``conf/trainer``.

    Attributes:
        kind: of router: mlp, linear or trees.
        features: names, of those in the data set.
        loss: regression, ranking or bce_top_share; trees always learn by regression.
        hidden: units of the hidden layer of each of the mlp's members.
        members: networks with other first weights, whose scores are averaged; one for other kinds.
        id_numbers: of the mlp, that are stored per id for what its embedding and entropies tell; 0: none, also of the
            id before.
        previous_numbers: the same per id before.
        max_epochs: passes over the training tokens; of trees: how many there are at most.
        patience: epochs without a better validation gain before training stops; of trees: rounds.
        batch_size: tokens.
        learning_rate: of Adam; of trees: their shrinkage.
        shrinkage, id_shrinkage, embed_shrinkage: see RouterModule.
        min_id_count: ids that occur less often in training share one row.
        num_leaves: of a tree.
        fast_dev_run: one batch of training and of validation, to see that it runs.

    Raises:
        ValueError: an unknown kind or loss, a number out of range, or a flag that is none.
    """

    kind: Kind
    features: Sequence[str] | None = None
    loss: LossName = "regression"
    hidden: int = 16
    members: int = 1
    id_numbers: int = 0
    previous_numbers: int = 4
    max_epochs: int = 40
    patience: int = 8
    batch_size: int = 1024
    learning_rate: float = 0.02
    shrinkage: float = 1.0
    id_shrinkage: float = 10.0
    embed_shrinkage: float = 170.0
    min_id_count: int = 2
    num_leaves: int = 16
    fast_dev_run: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"trainer.kind={self.kind!r}; kinds: {', '.join(get_args(Kind))}")
        if self.loss not in LOSSES:
            raise ValueError(f"trainer.loss={self.loss!r}; losses: {', '.join(LOSSES)}")
        counts = "max_epochs patience batch_size min_id_count hidden members previous_numbers"
        for name in (*counts.split(), "id_numbers"):
            least = int(name != "id_numbers")
            if type(value := getattr(self, name)) is not int or value < least:
                raise ValueError(f"trainer.{name}={value!r} must be an integer of at least {least}")
        if self.kind != "mlp" and (self.id_numbers or self.members != 1):
            raise ValueError(
                f"trainer.id_numbers={self.id_numbers} and trainer.members={self.members} are of the mlp: set 0 and 1 "
                f"for {self.kind}"
            )
        if type(self.num_leaves) is not int or self.num_leaves < 2:
            raise ValueError(
                f"trainer.num_leaves={self.num_leaves!r} must be an integer of at least 2"
            )
        check_flag("trainer.fast_dev_run", self.fast_dev_run)
        for name in ("learning_rate", "shrinkage", "id_shrinkage", "embed_shrinkage"):
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                raise ValueError(f"trainer.{name}={value!r} must be a number of at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What training gives.

    Attributes:
        kind: of router.
        bins: of the table; none of its own for trees.
        tensors: of tables.
        text: of trees.
        score_train_N, score_valid_N: float32 scores of the data set's tokens.
    """

    kind: Kind
    bins: Bins
    tensors: dict[str, Tensor]
    text: str
    score_train_N: Tensor
    score_valid_N: Tensor


def train(
    data: RouterData,
    options: TrainOptions,
    *,
    folder: Path,
    loggers: Sequence[Logger] = (),
    seed: int = 0,
) -> Trained:
    """Trains a router on ``data``, stopping where validation does not get better.

    Args:
        data: to learn from and to stop by.
        options: what and how.
        folder: gets ``checkpoints``.
        loggers: of losses and validation quality; not of trees, which take none.
        seed: of weights and batches. Equal seeds give equal routers.

    Raises:
        ValueError: trees without lightgbm.
    """
    if options.kind == "trees":
        return _train_trees(data, options, seed)
    module = _module(data, options, seed)
    fit_best(
        module,
        monitor=MONITORED,
        mode="max",
        max_epochs=options.max_epochs,
        patience=options.patience,
        fast_dev_run=options.fast_dev_run,
        folder=folder,
        loggers=loggers,
        datamodule=data,
    )
    bins, tensors = router_tensors(module, data, options.id_numbers, options.previous_numbers)
    kernels, table = ReferenceKernels(), router_table(bins, tensors)
    train_N, valid_N = (
        kernels.router_mlp(part.values_NF, part.ids_N, part.phase_N, table)
        for part in (data.train, data.valid)
    )
    return Trained(
        kind=options.kind,
        bins=bins,
        tensors=tensors,
        text="",
        score_train_N=train_N,
        score_valid_N=valid_N,
    )


def _module(data: RouterData, options: TrainOptions, seed: int) -> RouterModule:
    return RouterModule(
        num_rows=data.bins.num_rows,
        first_id_row=data.bins.first_id_row,
        hidden=options.hidden if options.kind == "mlp" else 0,
        loss=options.loss,
        cut_S=data.cut_S,
        learning_rate=options.learning_rate,
        shrinkage=options.shrinkage,
        id_shrinkage=options.id_shrinkage,
        seed=seed,
        num_tokens=len(data.train),
        members=options.members,
        embed_VE=None if data.id_inputs is None else data.id_inputs.embed_VE,
        embed_shrinkage=options.embed_shrinkage,
    )


def _train_trees(data: RouterData, options: TrainOptions, seed: int) -> Trained:
    """By Poisson regression on the label, as LightGBM has it; stopped by the validation gain."""
    lightgbm = import_lightgbm()
    train_label_N, valid_label_N = data.train.label_N, data.valid.label_N

    def gain(score: Any, _: Any) -> tuple[str, float, bool]:
        return (
            MONITORED,
            mean_gain(torch.from_numpy(np.asarray(score)).float(), valid_label_N),
            True,
        )

    classes = [name for name in data.features if name.endswith("token_type")]
    train_set = lightgbm.Dataset(
        data.train.values_NF.numpy(),
        label=(train_label_N / data.mean_label).numpy(),
        feature_name=list(data.features),
        categorical_feature=classes,
    )
    valid_set = train_set.create_valid(
        data.valid.values_NF.numpy(), label=(valid_label_N / data.mean_label).numpy()
    )
    parameters = {
        "objective": "poisson",
        "metric": "none",
        "num_leaves": options.num_leaves,
        "learning_rate": options.learning_rate,
        "min_data_in_leaf": 20,
        "lambda_l2": options.shrinkage,
        "seed": seed,
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": torch.get_num_threads(),
        "verbosity": -1,
    }
    booster = lightgbm.train(
        parameters,
        train_set,
        num_boost_round=1 if options.fast_dev_run else options.max_epochs,
        valid_sets=[valid_set],
        feval=gain,
        callbacks=[lightgbm.early_stopping(options.patience, verbose=False)],
    )
    text = booster.model_to_string(num_iteration=booster.best_iteration)

    def score(examples: Examples) -> Tensor:
        raw = booster.predict(
            examples.values_NF.numpy(), raw_score=True, num_iteration=booster.best_iteration
        )
        return torch.from_numpy(raw).float()

    return Trained(
        kind="trees",
        bins=Bins(data.features, tuple(() for _ in data.features), ()),
        tensors={},
        text=text,
        score_train_N=score(data.train),
        score_valid_N=score(data.valid),
    )
