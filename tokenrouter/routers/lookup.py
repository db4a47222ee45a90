"""A learned score made of look-ups: every feature falls into a bin, every bin has a row of numbers, rows are added.

The same functions serve in training and in routing, so that a score is what was trained. A token's score is the same
to the bit in any batch: look-ups, sums in a fixed order, no matrix products.

Shape letters: T tokens, F features, E edges of a feature (the longest list), I known ids, K rows of the table, H hidden
units, P phases, G groups of layers, which have a score each (1: one for all layers), O = P * G, phase by phase.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenrouter.features import of_one_phase
from tokenrouter.routers.id_numbers import PREVIOUS, IdRows, check_id_numbers, has_id_numbers
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


class RowFinder:
    """From features and ids to rows of the table.

    Args:
        bins: what belongs where.
    """

    def __init__(self, bins: Bins) -> None:
        self.num_rows = bins.num_rows
        counts = bins.num_bins
        self._last_F1 = torch.tensor(counts, dtype=torch.int64)[:, None] - 1
        # NaN comes behind the last infinite edge, which is at or beyond the bin of tokens without the feature
        self._edges_FE = torch.full((len(counts), max(counts, default=0)), float("inf"))
        for feature, edges in enumerate(bins.edges):
            self._edges_FE[feature, : len(edges)] = torch.tensor(edges)
        starts = torch.tensor([0, *counts]).cumsum(0)
        self._start_F1 = starts[:-1, None]
        largest = bins.ids[-1] if bins.ids else -1
        self._row_I = torch.full((largest + 2,), bins.num_rows - 1)
        self._row_I[list(bins.ids)] = torch.arange(len(bins.ids)) + bins.first_id_row

    def __call__(self, values_TF: Tensor, ids_T: Tensor) -> Tensor:
        """Rows of each token, int64 ``[T, F + 1]``: one per feature, one of its id.

        Args:
            values_TF: float32, the features in the order of the bins' names; NaN where one does not exist.
            ids_T: int64.
        """
        row_FT = torch.searchsorted(self._edges_FE, values_TF.t().contiguous())
        row_FT = row_FT.clamp_(max=self._last_F1) + self._start_F1
        id_T = self._row_I[ids_T.clamp(max=len(self._row_I) - 1)]
        return torch.cat([row_FT, id_T[None]]).t().contiguous()


def score_rows(table_KC: Tensor, head_PGH: Tensor, rows_TN: Tensor, phase_T: Tensor) -> Tensor:
    """Scores of tokens, float32 ``[T, G]``.

    Args:
        table_KC: float32 ``[K, H + O]``: what a row adds to the hidden units and, directly, to the scores.
        head_PGH: float32, what each hidden unit weighs in each score; without hidden units the score is additive.
        rows_TN: of each token.
        phase_T: int64.
    """
    sum_TC = F.embedding_bag(rows_TN, table_KC, mode="sum")
    phases, groups, hidden = head_PGH.shape
    index_T1G = phase_T[:, None, None].expand(-1, 1, groups)
    direct_TPG: Tensor = sum_TC[:, hidden:].unflatten(1, (phases, groups))
    score_TG = direct_TPG.gather(1, index_T1G).squeeze(1)
    if not hidden:
        return score_TG
    return score_TG + (sum_TC[:, None, :hidden].relu() * head_PGH[phase_T]).sum(2)


class Scorer:
    """Scores tokens by the tensors of a trained router.

    Args:
        bins: of the table.
        tensors: float32 ``table [K, H + O]`` and ``head [O, H]``, and those of IdRows where there are any.
    """

    def __init__(self, bins: Bins, tensors: Mapping[str, Tensor]) -> None:
        self._rows = RowFinder(bins)
        self._table_KC = tensors["table"]
        self._head_PGH = tensors["head"].unflatten(0, (NUM_PHASES, -1))
        self._id_rows: IdRows | None = None
        if has_id_numbers(tensors):
            self._id_rows, self._previous = IdRows(tensors), bins.names.index(PREVIOUS)
            self._table_KC = torch.cat([self._table_KC, self._id_rows.table_KC])

    def __call__(self, values_TF: Tensor, ids_T: Tensor, phase_T: Tensor) -> Tensor:
        """Scores, float32 ``[T, G]``.

        Args:
            values_TF: float32, the features in the order of the bins' names.
            ids_T: int64.
            phase_T: int64.
        """
        rows_TN = self._rows(values_TF, ids_T)
        if self._id_rows is not None:
            more_T2 = self._id_rows(ids_T, values_TF[:, self._previous].long())
            rows_TN = torch.cat([rows_TN, more_T2 + self._rows.num_rows], 1)
        return score_rows(self._table_KC, self._head_PGH, rows_TN, phase_T)


def check_tensors(
    bins: Bins, tensors: Mapping[str, Tensor], *, hidden: int, num_groups: int
) -> str | None:
    """What is wrong with the tensors of a scorer; None where nothing is."""
    scores = NUM_PHASES * num_groups
    wanted: dict[str, Sequence[int]] = {
        "table": (bins.num_rows, hidden + scores),
        "head": (scores, hidden),
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
    return check_id_numbers(tensors, columns=hidden + scores)
