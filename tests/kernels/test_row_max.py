"""Guards the largest value of a row and its index: what a greedy token is, and whether a row can be sampled at all."""

import pytest
import torch

from tests.kernels.conftest import Typed
from tokenrouter.kernels import NativeKernels

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 1023, 1024, 1025, 5000])
def test_equals_torch(typed: Typed, width: int) -> None:
    """Ties (bfloat16 has many) not at their lowest index, the end of a row that fills no vector, strided rows."""
    kernels, dtype = typed
    torch.manual_seed(width)
    wide_TX = torch.full((9, width + 7), 1e30).to(dtype)
    x_TV = wide_TX[:, 3 : 3 + width].copy_(torch.randn(9, width))
    x_TV[1] = -5.0
    x_TV[2] = -INF
    x_TV[3, width // 2] = INF
    values_T, ids_T = kernels.row_max(x_TV)
    expected_T = x_TV.float().amax(-1)
    assert values_T.dtype == dtype and ids_T.dtype == torch.int64
    assert torch.equal(values_T.float(), expected_T)
    first_T = (x_TV.float() == expected_T[:, None]).int().argmax(-1)
    assert torch.equal(ids_T, first_T)


@pytest.mark.parametrize("place", [0, 1, 16, 1030, 2047, 2049])
def test_nan_counts_as_largest(typed: Typed, place: int) -> None:
    """A row with NaN that looks as if it could be sampled, because every comparison with NaN is false."""
    kernels, dtype = typed
    x_TV = torch.zeros(3, 2050).to(dtype)
    x_TV[1, place] = NAN
    x_TV[1, 2049] = NAN
    x_TV[1, 5] = INF
    x_TV[2, place] = 2.0
    values_T, ids_T = kernels.row_max(x_TV)
    assert values_T.isnan().tolist() == [False, True, False]
    assert ids_T.tolist() == [0, place, place]


def test_zeros_of_either_sign_are_equal(typed: Typed) -> None:
    """An index that depends on the sign of zero."""
    kernels, dtype = typed
    x_TV = torch.full((1, 40), -1.0).to(dtype)
    x_TV[0, 7], x_TV[0, 30] = -0.0, 0.0
    assert kernels.row_max(x_TV)[1].tolist() == [7]


def test_no_rows(typed: Typed) -> None:
    """A step in which nothing is due."""
    values_T, ids_T = typed.kernels.row_max(torch.zeros(0, 8).to(typed.dtype))
    assert values_T.shape == ids_T.shape == (0,)


def test_refusals(native: NativeKernels) -> None:
    """A read from an empty row, or along columns as if they were rows."""
    with pytest.raises(ValueError, match="at least one feature"):
        native.row_max(torch.zeros(2, 0))
    with pytest.raises(ValueError, match="x must be"):
        native.row_max(torch.zeros(4, 3).t())
    assert native.row_max(torch.tensor([[1.0, 3.0]]).half())[1].tolist() == [1], (
        "torch's dtypes still work"
    )
