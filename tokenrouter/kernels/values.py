"""What operators take and give beside tensors: quantised rows, packed weights, norms, cuts, plans, routers' tables.

T rows, K inputs, E features.
"""

from enum import Enum
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

WeightFormat = Literal["dense", "int8", "int4"]


class QuantizedRows(NamedTuple):
    """``x ~ q_TK * scale_T1``: int8 values in -127 .. 127, a scale per row, and the dtype of ``x``.

    The scales are bfloat16 for a bfloat16 ``x``, else float32 (float16 has no room for small ones).
    """

    q_TK: Tensor
    scale_T1: Tensor
    dtype: torch.dtype

    @classmethod
    def empty(
        cls, num_rows: int, width: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> "QuantizedRows":
        """Room for ``num_rows`` rows of ``width`` values of ``dtype``."""
        return cls(
            torch.empty(num_rows, width, dtype=torch.int8, device=device),
            torch.empty(num_rows, 1, dtype=scale_dtype(dtype), device=device),
            dtype,
        )


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of row scales for rows of ``dtype``."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


class Int8Entries(NamedTuple):
    """KV entries in int8: ``q_SPD`` int8, ``scale_SP`` float32 per plane. They are numbered on from the full ones.

    S slots, P planes (key heads, then value heads), D head size. An entry reads as ``q * scale`` in the model's dtype.
    """

    q_SPD: Tensor
    scale_SP: Tensor


class Cut(NamedTuple):
    """What a draw leaves of each of T rows: first ``min_p``, of the rest ``top_k``, of the rest ``top_p``.

    Attributes:
        top_k_T: int64, at least 0: so many of the largest logits, of equal ones the lower ids; 0: all.
        top_p_T: float64, above 0 and at most 1: the fewest of the largest with at least this share of the mass.
        min_p_T: float64, in [0, 1]: those with at least this share of the largest one's mass.
    """

    top_k_T: Tensor
    top_p_T: Tensor
    min_p_T: Tensor


class BinRows(NamedTuple):
    """Which rows of a router's table belong to features and known ids. F features, E edges, I known ids.

    Attributes:
        edges_FE: float32, ascending, padded with infinity: a value's bin is the number of edges that it exceeds, NaN
            exceeds all.
        starts_F: int64, the row of a feature's first bin.
        lasts_F: int64, its last bin, which higher ones count as.
        id_rows_I: int64, the row of each id; the last one is that of all ids beyond.
    """

    edges_FE: Tensor
    starts_F: Tensor
    lasts_F: Tensor
    id_rows_I: Tensor


class RouterTable(NamedTuple):
    """What a learned router scores by. K rows, H hidden units, P phases.

    Attributes:
        bins: rows of features and known ids.
        table_KC: float32 ``[K, H + P]``: what a row adds to the hidden units and, directly, to each phase's score.
        head_PH: float32, what each hidden unit weighs in each phase's score, which is additive without them.
        vocab_row: from here on there is a row per id of a vocabulary and one for all beyond, then as many for the id
            before, the last one also for none; None: there are no such rows.
        previous_column: with ``vocab_row``, the feature that holds the id before.
    """

    bins: BinRows
    table_KC: Tensor
    head_PH: Tensor
    vocab_row: int | None = None
    previous_column: int = -1


class Product(Enum):
    """How rows meet weights: which operator a path's linears are."""

    DENSE = "matmul"
    INT8 = "int8_matmul"  # of quantize_rows
    INT8_WEIGHT = "int8_weight_matmul"
    INT4 = "int4_matmul"  # of quantize_rows

    @property
    def weight_format(self) -> WeightFormat:
        """What it multiplies by; products of one format share packed weights."""
        match self:
            case Product.DENSE:
                return "dense"
            case Product.INT4:
                return "int4"
            case _:
                return "int8"

    @property
    def quantizes_rows(self) -> bool:
        """Whether it takes QuantizedRows."""
        return self in (Product.INT8, Product.INT4)


class Norm(NamedTuple):
    """An RMS norm: ``weight_E`` in the rows' dtype, and its epsilon."""

    weight_E: Tensor
    eps: float


class PackedWeights(Protocol):
    """Weights in the layout that one backend's products read; opaque to everyone else."""

    @property
    def weight(self) -> Tensor:
        """The tensor that a product streams."""


class LayerTail(Protocol):
    """The token-wise operators between one layer's attention and the next one's, in one call."""

    def __call__(self, heads_TA: Tensor, hidden_TE: Tensor, qkv_TO: Tensor | None) -> None:
        """Adds the output projection of ``heads_TA``, then the gated MLP, to ``hidden_TE`` in place.

        ``qkv_TO``: None, or overwritten with the next layer's projection of the normed ``hidden_TE``.
        """


class AttentionPlan(Protocol):
    """What one backend prepared for a forward; opaque to everyone else."""

    @property
    def received_size(self) -> int:
        """Length of ``received``: the visible entries of all requests, request by request."""

    @property
    def num_blocks(self) -> int:
        """Blocks that ``BlockMeans`` must have room for; 0: no row is sparse that does not see all."""
