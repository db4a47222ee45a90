"""A learned score made of look-ups: every feature falls into a bin, every bin has a row of numbers, rows are added.

``kernels/router_mlp`` computes it; training finds rows by the same function, so that a score is what was trained.

Shape letters: F features, E edges of a feature (the longest list), I known ids, K rows of the table, H hidden units,
P phases.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenrouter.features import of_one_phase
from tokenrouter.kernels import BinRows, RouterTable
from tokenrouter.routers.id_numbers import (
    PREVIOUS,
    check_id_numbers,
    has_id_numbers,
    vocabulary_rows,
)
from tokenrouter.types import Phase

NUM_PHASES = len(Phase)


@dataclass(frozen=True, slots=True)
class Bins:
    """Which rows of the table belong to a token.

    Attributes:
        names: of the features, in the order of the columns.
        edges: per feature ascending values: a value belongs to the bin of as many edges as it exceeds. A feature
            that does not exist in both phases has one bin more, for tokens without it.
        ids: ascending token ids that have a row of their own; all others share one.
    """

    names: tuple[str, ...]
    edges: tuple[tuple[float, ...], ...]
    ids: tuple[int, ...]

    @property
    def num_bins(self) -> list[int]:
        """How many bins each feature has."""
        lacked = of_one_phase(self.names)
        return [
            len(edges) + 1 + (name in lacked)
            for name, edges in zip(self.names, self.edges, strict=True)
        ]

    @property
    def num_rows(self) -> int:
        """K: the bins of all features, then one row per known id, then one for the others."""
        return sum(self.num_bins) + len(self.ids) + 1

    @property
    def first_id_row(self) -> int:
        """Where the rows of ids begin."""
        return self.num_rows - len(self.ids) - 1

    def row_names(self) -> list[str]:
        """Per row the feature that it belongs to; ``id`` for those of ids."""
        per_bin = [[name] * count for name, count in zip(self.names, self.num_bins, strict=True)]
        return [name for part in per_bin for name in part] + ["id"] * (len(self.ids) + 1)


def bin_rows(bins: Bins) -> BinRows:
    """The rows of ``bins`` as operators read them."""
    counts = bins.num_bins
    # NaN comes behind the last infinite edge, which is at or beyond the bin of tokens without the feature
    edges_FE = torch.full((len(counts), max(counts, default=0)), float("inf"))
    for feature, edges in enumerate(bins.edges):
        edges_FE[feature, : len(edges)] = torch.tensor(edges)
    largest = bins.ids[-1] if bins.ids else -1
    id_rows_I = torch.full((largest + 2,), bins.num_rows - 1)
    id_rows_I[list(bins.ids)] = torch.arange(len(bins.ids)) + bins.first_id_row
    counts_F = torch.tensor(counts, dtype=torch.int64)
    return BinRows(
        edges_FE=edges_FE,
        starts_F=counts_F.cumsum(0) - counts_F,
        lasts_F=counts_F - 1,
        id_rows_I=id_rows_I,
    )


def router_table(bins: Bins, tensors: Mapping[str, Tensor]) -> RouterTable:
    """What ``KernelSet.router_mlp`` scores by.

    Args:
        bins: of the table.
        tensors: of a trained router: float32 ``table [K, H + P]`` and ``head [P, H]``, and those of
            ``vocabulary_rows`` where there are any.
    """
    table = RouterTable(
        bins=bin_rows(bins),
        table_KC=tensors["table"],
        head_PH=tensors["head"],
    )
    if not has_id_numbers(tensors):
        return table
    return table._replace(
        table_KC=torch.cat([table.table_KC, vocabulary_rows(tensors)]),
        vocab_row=bins.num_rows,
        previous_column=bins.names.index(PREVIOUS),
    )


def check_tensors(bins: Bins, tensors: Mapping[str, Tensor], *, hidden: int) -> str | None:
    """What is wrong with the tensors of a scorer; None where nothing is."""
    wanted: dict[str, Sequence[int]] = {
        "table": (bins.num_rows, hidden + NUM_PHASES),
        "head": (NUM_PHASES, hidden),
    }
    for name, shape in wanted.items():
        if name not in tensors:
            return f"tensor {name} is missing"
        if tuple(tensors[name].shape) != tuple(shape):
            return (
                f"tensor {name} has shape {list(tensors[name].shape)} and should have {list(shape)}"
            )
        if not bool(tensors[name].isfinite().all()):
            return f"tensor {name} holds values that are not finite"
    if not has_id_numbers(tensors):
        return None
    if PREVIOUS not in bins.names:
        return f"numbers of the id before need the feature {PREVIOUS}"
    return check_id_numbers(tensors, columns=hidden + NUM_PHASES)
