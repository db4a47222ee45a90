"""The largest value of each row and where it is: a greedy token, and a check that the row can be sampled."""

from torch import Tensor

from tokenrouter.kernels.checks import check_rows


def row_max(x_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Largest values ``[T]`` (of the dtype of ``x_TV``) and their lowest indices (int64 ``[T]``); NaN is largest."""
    check_rows(x_TV)
    values_T, ids_T = x_TV.max(dim=-1)  # three times as fast as argmax on the CPU
    return values_T, ids_T
