"""What every backend refuses in the same words: ValueErrors that name the argument, before anything is computed.

T rows, K inputs, N outputs, S slots.
"""

from typing import TypeVar

from torch import Tensor

from tokenrouter.kernels.values import PackedWeights, Product
from tokenrouter.types import SparseRows

MAX_INT8_INPUTS = (2**31 - 1) // 127**2  # sums of more products of int8 values leave int32

Packed = TypeVar("Packed")


def check_rows(x_TK: Tensor) -> None:
    """Raises ValueError when ``x_TK`` is not rows of at least one feature."""
    if x_TK.dim() != 2 or not x_TK.shape[1]:
        raise ValueError(
            f"x must be [rows, features] with at least one feature, got shape {list(x_TK.shape)}"
        )


def check_gate_up(gate_up_TJ: Tensor) -> None:
    """Raises ValueError when ``gate_up_TJ`` is not rows of gate and as many up features."""
    if gate_up_TJ.dim() != 2 or gate_up_TJ.shape[1] % 2:
        raise ValueError(
            f"gate_up must be [rows, features], an even number of features, got shape {list(gate_up_TJ.shape)}"
        )


def check_norm(x_TE: Tensor, weight_E: Tensor) -> None:
    """Raises ValueError when ``weight_E`` is not as wide as ``x_TE``, which has two or three dimensions."""
    if x_TE.dim() not in (2, 3):
        raise ValueError(f"x must have two or three dimensions, got shape {list(x_TE.shape)}")
    if weight_E.shape != x_TE.shape[-1:]:
        raise ValueError(f"weight must have shape {[x_TE.shape[-1]]}, got {list(weight_E.shape)}")


def check_weights(weight_NK: Tensor, bias_N: Tensor | None, *, gated: bool) -> None:
    """Raises ValueError for weights that cannot be packed: of no float dtype, empty, an odd number of gated rows.

    A bias of another length than ``weight_NK`` has rows is refused too.
    """
    if weight_NK.dim() != 2 or not weight_NK.numel() or not weight_NK.is_floating_point():
        raise ValueError(
            "weight must be floats [N, K] with at least one output and one input, "
            f"got {weight_NK.dtype} of shape {list(weight_NK.shape)}"
        )
    if bias_N is not None and bias_N.shape != weight_NK.shape[:1]:
        raise ValueError(
            f"bias must have shape {list(weight_NK.shape[:1])}, got {list(bias_N.shape)}"
        )
    if gated and weight_NK.shape[0] % 2:
        raise ValueError(f"gated weights need an even number of rows, got {weight_NK.shape[0]}")


def check_packed(product: Product, packed: PackedWeights, wanted: type[Packed]) -> Packed:
    """``packed``; raises ValueError when it is not what ``product`` reads: another format or another backend's."""
    if not isinstance(packed, wanted):
        raise wrong_format(product, type(packed).__name__)
    return packed


def wrong_format(product: Product, found: str) -> ValueError:
    """The error of a product that was given ``found`` weights."""
    form = product.weight_format
    pack = "pack_matmul" if form == "dense" else f"pack_{form}"
    return ValueError(
        f"{product.value} was given {found} weights: pack them with {pack} of the same kernels"
    )


def check_accumulate(out: Tensor | None, accumulate: bool) -> None:
    """Raises ValueError when there is nothing to add to."""
    if accumulate and out is None:
        raise ValueError("accumulate=True adds to out: give the tensor that it adds to")


def check_product(
    x_TK: Tensor, num_inputs: int, num_outputs: int, out: Tensor | None, accumulate: bool
) -> None:
    """Raises ValueError when rows or ``out`` do not fit weights of that size."""
    check_accumulate(out, accumulate)
    if x_TK.dim() != 2 or x_TK.shape[1] != num_inputs:
        raise ValueError(f"rows must have shape [rows, {num_inputs}], got {list(x_TK.shape)}")
    if out is not None and out.shape != (x_TK.shape[0], num_outputs):
        raise ValueError(
            f"out must have shape {[x_TK.shape[0], num_outputs]}, got {list(out.shape)}"
        )


def check_plan(
    window: int | None, num_slots: int, num_int8: int, sparse: SparseRows | None = None
) -> None:
    """Raises ValueError for a window that shows nothing or cuts sparse rows, or slots of which no one is full."""
    if window is not None and sparse is not None:
        raise ValueError("attention with a window of the model's own cannot be sparse")
    if window is not None and window < 1:
        raise ValueError(
            f"window={window} shows a query no key: it must be at least 1, or None for all earlier keys"
        )
    if not 0 <= num_int8 < num_slots:
        raise ValueError(
            f"num_int8={num_int8} must be at least 0 and below num_slots={num_slots}: the null slot is a full one"
        )


def num_query_heads(qkv_TO: Tensor, kv_SPD: Tensor) -> int:
    """The query heads in ``qkv_TO``; raises ValueError when it is not whole heads of the arena's size."""
    head_dim = kv_SPD.shape[2] if kv_SPD.dim() == 3 else 0
    if not head_dim:
        raise ValueError(
            f"kv must be [slots, 2 x key heads, head size], got shape {list(kv_SPD.shape)}"
        )
    num_heads = qkv_TO.shape[-1] // head_dim - kv_SPD.shape[1] if qkv_TO.dim() == 2 else -1
    if num_heads < 0 or qkv_TO.shape[1] % head_dim:
        raise ValueError(
            f"qkv must be [tokens, heads x {head_dim}] with {kv_SPD.shape[1]} heads of keys and values, "
            f"got shape {list(qkv_TO.shape)}"
        )
    return num_heads
