"""The data set of task=collect as a router's training takes it.

N tokens, F features, L label columns that are added up, R = F + 1 rows of the table per token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from tokenrouter.features import FEATURES, where_they_exist
from tokenrouter.kernels.router_mlp.reference import rows_of
from tokenrouter.routers.id_numbers import PREVIOUS
from tokenrouter.routers.lookup import Bins, bin_rows
from tokenrouter.training.id_inputs import IdInputs
from tokenrouter.training.losses import SHARES
from tokenrouter.training.storage import LabelStore

MAX_CLASSES = 64
NUM_QUANTILES = 24
COLUMNS = ("features", "label", "token_id", "phase", "text")


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """Labelled tokens.

    Attributes:
        values_NF: float32 features; NaN where one does not exist in the token's phase.
        ids_N: int64.
        phase_N: int64.
        label_NL: float32, 0 or more: of each layer, where the label is per layer.
        label_N: their sum.
        texts: name of each token's source.
    """

    values_NF: Tensor
    ids_N: Tensor
    phase_N: Tensor
    label_NL: Tensor
    label_N: Tensor
    texts: list[str]

    def __len__(self) -> int:
        return len(self.ids_N)


class RouterData(lightning.LightningDataModule):
    """Training and validation tokens, told apart by document.

    Args:
        path: folder of the data set.
        features: names of those to learn from; None: all that are stored.
        layers: whose labels are added up; None: all that run after the decision.
        texts: names of sources to learn from; None: all.
        batch_size: tokens.
        min_id_count: an id that occurs so often in training gets a row of its own.
        seed: of the order of the batches.
        id_inputs: what is known of ids beside their labels; needs the feature ``previous_id``.

    Raises:
        ValueError: no data set, one that is empty, damaged or of retention labels, features that it lacks, values
            that are not finite, labels that do not differ, or fewer than two tokens in a split.
    """

    def __init__(
        self,
        path: str,
        *,
        features: Sequence[str] | None = None,
        layers: Sequence[int] | None = None,
        texts: Sequence[str] | None = None,
        batch_size: int = 1024,
        min_id_count: int = 2,
        seed: int = 0,
        id_inputs: IdInputs | None = None,
    ) -> None:
        super().__init__()
        store = LabelStore(path)
        self.facts = store.about
        if texts is not None:
            known = self.facts["texts"]
            self.facts["texts"] = {name: known[name] for name in known if name in texts}
        if self.facts["kind"] != "precision":
            raise ValueError(
                f"{path} holds {self.facts['kind']} labels ({self.facts['label']}), and a router of precision needs "
                "precision labels: collect with labels=fisher"
            )
        self.path, self.batch_size, self.seed = path, batch_size, seed
        stored = list(self.facts["features"])
        self.features = tuple(stored if features is None else features)
        if missing := [name for name in self.features if name not in stored]:
            raise ValueError(
                f"{path} has no feature {', '.join(missing)}; it has: {', '.join(stored)}. Collect again with "
                "collect.features, or choose others with trainer.features"
            )
        columns = _label_columns(self.facts, layers)
        read = [stored.index(name) for name in self.features]
        self.train, self.valid = (
            _examples(store, split, texts, read, columns, self.features)
            for split in ("train", "valid")
        )
        if id_inputs is not None and PREVIOUS not in self.features:
            raise ValueError(
                f"trainer.id_numbers above 0 needs the feature {PREVIOUS}: add it to trainer.features, or set "
                "trainer.id_numbers=0"
            )
        self.id_inputs = id_inputs
        self.bins = Bins(
            self.features,
            tuple(_edges(name, self.train.values_NF[:, i]) for i, name in enumerate(self.features)),
            _frequent_ids(self.train.ids_N, min_id_count),
        )
        label_N = self.train.label_N
        self.mean_label = float(label_N.double().mean())
        cuts = torch.tensor([1 - share for share in SHARES])
        self.cut_S = _quantile(label_N, cuts) / self.mean_label

    @property
    def has_layers(self) -> bool:
        """Whether there is a label for each layer after the decision."""
        names, first = list(self.facts["label_columns"]), self.facts.get("after_layer", 0)
        decided = len(names) - first
        return (
            names == [f"layer_{layer}" for layer in range(len(names))]
            and self.train.label_NL.shape[1] == decided > 1
        )

    def rows(self, examples: Examples) -> Tensor:
        """Rows of the table per token, int64 ``[N, R]``."""
        return rows_of(examples.values_NF, examples.ids_N, bin_rows(self.bins))

    def previous(self, examples: Examples) -> Tensor:
        """The id before each token, int64 ``[N]``; -1 for none, or where the feature is not learned from."""
        if PREVIOUS not in self.features:
            return torch.full_like(examples.ids_N, -1)
        return examples.values_NF[:, self.features.index(PREVIOUS)].long()

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled batches of what RouterModule takes, and the label as a multiple of its mean."""
        generator = torch.Generator().manual_seed(self.seed)
        return self._loader(self.train, generator)

    def val_dataloader(self) -> DataLoader[Any]:
        """All validation tokens in batches, in their order."""
        return self._loader(self.valid, None)

    def _loader(self, examples: Examples, generator: torch.Generator | None) -> DataLoader[Any]:
        label_N = examples.label_N / self.mean_label
        previous_N, entropy_N2 = self.previous(examples), torch.zeros(len(examples), 0)
        if self.id_inputs is not None:
            entropy_N2 = self.id_inputs.entropies(examples.ids_N, previous_N)
        ids_N2 = torch.stack([examples.ids_N, previous_N], 1)
        tensors = TensorDataset(self.rows(examples), examples.phase_N, ids_N2, entropy_N2, label_N)
        order: Sampler[int] = SequentialSampler(tensors)
        if generator is not None:
            order = RandomSampler(tensors, generator=generator)
        batches = BatchSampler(order, self.batch_size, drop_last=False)
        return DataLoader(tensors, sampler=batches, batch_size=None)


def _label_columns(facts: dict[str, Any], layers: Sequence[int] | None) -> list[int]:
    """Indices of the columns to add up."""
    names = list(facts["label_columns"])
    if layers is None:
        decided = {f"layer_{layer}" for layer in range(facts.get("after_layer", 0))}
        return [index for index, name in enumerate(names) if name not in decided]
    wanted = [f"layer_{layer}" for layer in layers]
    if not wanted or any(name not in names for name in wanted):
        raise ValueError(
            f"train.layers={list(layers)}: the label {facts['label']} has columns {names[0]} to {names[-1]}; "
            "choose layers "
            "among them, or null for all"
        )
    return [names.index(name) for name in wanted]


def _examples(
    store: LabelStore,
    split: str,
    texts: Sequence[str] | None,
    features: list[int],
    columns: list[int],
    names: Sequence[str],
) -> Examples:
    """One split, checked."""
    rows = store.load(split, texts).select_columns(list(COLUMNS)).with_format("numpy")[:]
    values_NF = torch.from_numpy(rows["features"])[:, features].float()
    phase_N = torch.from_numpy(rows["phase"]).long()
    exists_NF = where_they_exist(names, phase_N)
    label_NL = torch.from_numpy(rows["label"])[:, columns].float()
    label_N = label_NL.sum(1)
    for index, name in enumerate(names):
        known_N = values_NF[exists_NF[:, index], index]
        if not len(known_N):
            raise ValueError(
                f"{store.path}: feature {name} exists for none of the {len(values_NF)} {split} tokens: all are "
                "of the other phase: leave it out with trainer.features, or collect more windows"
            )
        if bad := int((~known_N.isfinite()).sum()):
            raise ValueError(
                f"{store.path}: feature {name} is not finite for {bad} of {len(values_NF)} {split} tokens: leave "
                "it out "
                "with trainer.features, or collect again"
            )
    if not bool((label_NL.isfinite() & (label_NL >= 0)).all()):
        raise ValueError(
            f"{store.path}: a {split} label is negative or not finite: choose other train.layers, or collect again"
        )
    if len(label_N) < 2 or float(label_N.min()) == float(label_N.max()):
        raise ValueError(
            f"{store.path}: the {len(label_N)} {split} tokens all have the same label, so there is nothing to "
            "learn: collect "
            "more tokens, or choose an executor whose low path changes results"
        )
    return Examples(
        values_NF=values_NF.masked_fill(~exists_NF, math.nan),
        ids_N=torch.from_numpy(rows["token_id"]).long(),
        phase_N=phase_N,
        label_NL=label_NL,
        label_N=label_N,
        texts=[str(text) for text in rows["text"]],
    )


def _frequent_ids(ids_N: Tensor, min_count: int) -> tuple[int, ...]:
    ids, counts = ids_N.unique(return_counts=True)
    return tuple(ids[counts >= min_count].tolist())


def _edges(name: str, value_N: Tensor) -> tuple[float, ...]:
    """Where a feature is cut: classes one by one, counts in growing steps, ids nowhere, others in equal parts."""
    spec = FEATURES[name]
    if name == PREVIOUS:
        return ()
    value_N = value_N[~value_N.isnan()]
    is_whole = bool((value_N == value_N.round()).all())
    if is_whole and spec.high - spec.low <= MAX_CLASSES:
        return tuple(spec.low + i + 0.5 for i in range(int(spec.high - spec.low)))
    if is_whole:
        steps = _growing(float(value_N.abs().max()))
        low = [-step for step in reversed(steps)] if spec.low < 0 else []
        return tuple(edge for edge in (*low, *steps) if value_N.min() <= edge < value_N.max())
    shares = torch.arange(1, NUM_QUANTILES) / NUM_QUANTILES
    edges: list[float] = _quantile(value_N, shares).unique().tolist()
    return tuple(edges)


def _growing(largest: float) -> list[float]:
    """0.5, 1.5, 2.5, 3.5, 5.5, ...: steps that grow by the square root of 2."""
    found, edge = [0.5], 1.0
    while found[-1] < largest:
        edge *= 2**0.5
        found.append(max(round(edge) + 0.5, found[-1] + 1))
    return found


def _quantile(value_N: Tensor, shares: Tensor) -> Tensor:
    """By sorting, since torch.quantile refuses many values."""
    index = (shares * (len(value_N) - 1)).round().long()
    return value_N.sort().values[index]
