"""The score of a learned router: every feature falls into a bin, every bin has a row of numbers, rows are added.

A token's score is the same to the bit in any batch: look-ups and sums in a fixed order, no matrix products.

T tokens, F features, I known ids, N rows of a token, K rows of the table, H hidden units, P phases, C = H + P
columns.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenrouter.kernels.values import BinRows, RouterTable


def router_mlp(values_TF: Tensor, ids_T: Tensor, phase_T: Tensor, table: RouterTable) -> Tensor:
    """See KernelSet; differentiable in the table and the head."""
    check_router(values_TF, ids_T, phase_T, table)
    rows_TN = rows_of(values_TF, ids_T, table.bins)
    if table.vocab_row is not None:
        rows_TN = torch.cat([rows_TN, _vocabulary_rows(values_TF, ids_T, table)], 1)
    return _score(table.table_KC, table.head_PH, rows_TN, phase_T)


def rows_of(values_TF: Tensor, ids_T: Tensor, bins: BinRows) -> Tensor:
    """Rows of each token, int64 ``[T, F + 1]``: one per feature, one of its id.

    Args:
        values_TF: float32; NaN where a feature does not exist.
        ids_T: int64.
        bins: of the features, in their order.
    """
    row_FT = torch.searchsorted(bins.edges_FE, values_TF.t().contiguous())
    row_FT = row_FT.clamp_(max=bins.lasts_F[:, None]) + bins.starts_F[:, None]
    id_T = bins.id_rows_I[ids_T.clamp(max=len(bins.id_rows_I) - 1)]
    return torch.cat([row_FT, id_T[None]]).t().contiguous()


def _vocabulary_rows(values_TF: Tensor, ids_T: Tensor, table: RouterTable) -> Tensor:
    """Rows of each token's id and of the id before, int64 ``[T, 2]``."""
    assert table.vocab_row is not None
    beyond = (len(table.table_KC) - table.vocab_row) // 2 - 1
    previous_T = values_TF[:, table.previous_column].long()
    previous_T = previous_T.masked_fill(previous_T < 0, beyond)
    rows_T2 = torch.stack([ids_T, previous_T], 1).clamp_(max=beyond) + table.vocab_row
    rows_T2[:, 1] += beyond + 1
    return rows_T2


def _score(table_KC: Tensor, head_PH: Tensor, rows_TN: Tensor, phase_T: Tensor) -> Tensor:
    """Float32 ``[T]``."""
    sum_TC = F.embedding_bag(rows_TN, table_KC, mode="sum")
    hidden = head_PH.shape[1]
    score_T = sum_TC[:, hidden:].gather(1, phase_T[:, None]).squeeze(1)
    if not hidden:
        return score_T
    return score_T + sum_by_halves(sum_TC[:, :hidden].relu() * head_PH[phase_T])


def sum_by_halves(x_TH: Tensor) -> Tensor:
    """Sums of rows, ``[T]``, the upper half onto the lower one until one is left: in any batch the same.

    What is no power of two is filled up with zeros.
    """
    size = 1 << (x_TH.shape[1] - 1).bit_length()
    x_TH = F.pad(x_TH, (0, size - x_TH.shape[1]))
    while size > 1:
        size //= 2
        x_TH = x_TH[:, :size] + x_TH[:, size:]
    return x_TH.squeeze(1)


def check_router(values_TF: Tensor, ids_T: Tensor, phase_T: Tensor, table: RouterTable) -> None:
    """Raises ValueError when tokens do not fit the bins, or a table its head."""
    bins, head_PH = table.bins, table.head_PH
    num_tokens, num_features = len(ids_T), len(bins.starts_F)
    if values_TF.shape != (num_tokens, num_features):
        raise ValueError(
            f"values must have shape {[num_tokens, num_features]}, got {list(values_TF.shape)}"
        )
    if phase_T.shape != ids_T.shape:
        raise ValueError(f"phases must have shape {list(ids_T.shape)}, got {list(phase_T.shape)}")
    if head_PH.dim() != 2 or not head_PH.shape[0]:
        raise ValueError(f"head must be [phases, hidden], got shape {list(head_PH.shape)}")
    columns = head_PH.shape[1] + head_PH.shape[0]
    if table.table_KC.dim() != 2 or table.table_KC.shape[1] != columns:
        raise ValueError(
            f"table must have {columns} columns, got shape {list(table.table_KC.shape)}"
        )
    if table.vocab_row is None:
        return
    size = len(table.table_KC) - table.vocab_row
    if table.vocab_row < 0 or size < 2 or size % 2:
        raise ValueError(
            f"vocab_row {table.vocab_row} must leave as many rows for ids as for those before, of "
            f"{len(table.table_KC)}"
        )
    if not 0 <= table.previous_column < num_features:
        raise ValueError(
            f"previous_column {table.previous_column} must be one of {num_features} features"
        )
