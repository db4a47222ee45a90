"""What an id and the id before it add to a score: a few int8 numbers each, as rows of the table.

Training derives the numbers from embeddings and from entropies of text; a router that runs sees no weights of the
model. When it is loaded the numbers become rows, so that a token costs two look-ups more.

Shape letters: V vocabulary, R numbers, C columns of the table.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

PREVIOUS = "previous_id"
"""The feature that the id before comes from."""
NAMES = ("id_codes", "id_weights", "previous_codes", "previous_weights")


def vocabulary_rows(tensors: Mapping[str, Tensor]) -> Tensor:
    """Rows of ids, float32 ``[2 * (V + 1), C]``: one per id, one of zeros for all beyond; as many of the id before.

    Args:
        tensors: ``id_codes`` and ``previous_codes``, int8 ``[V, R]``, with float32 ``id_weights`` and
            ``previous_weights``, ``[R, C]``, which take R numbers to a row; R may differ.
    """
    parts = []
    for name in ("id", "previous"):
        rows_VC = tensors[f"{name}_codes"].float() @ tensors[f"{name}_weights"]
        parts += [rows_VC, torch.zeros(1, rows_VC.shape[1])]
    return torch.cat(parts)


def has_id_numbers(tensors: Mapping[str, Tensor]) -> bool:
    """Whether any of the tensors of ``vocabulary_rows`` is there."""
    return any(name in tensors for name in NAMES)


def check_id_numbers(tensors: Mapping[str, Tensor], *, columns: int) -> str | None:
    """What is wrong with the tensors of ``vocabulary_rows`` beside a table of C ``columns``; None where nothing is."""
    if missing := [name for name in NAMES if name not in tensors]:
        return f"tensor {missing[0]} is missing"
    for kind in ("id", "previous"):
        codes, weights = tensors[f"{kind}_codes"], tensors[f"{kind}_weights"]
        numbers = weights.shape[0]
        wanted = (len(tensors["id_codes"]), numbers), (numbers, columns)
        if codes.dtype != torch.int8 or (tuple(codes.shape), tuple(weights.shape)) != wanted:
            return (
                f"tensors {kind}_codes and {kind}_weights are {codes.dtype} {list(codes.shape)} and "
                f"{list(weights.shape)} and should be torch.int8 {list(wanted[0])} and {list(wanted[1])}"
            )
        if not bool(weights.isfinite().all()):
            return f"tensor {kind}_weights holds values that are not finite"
    return None
