"""What Triton kernels share: rounding, configurations that collapse to one in the interpreter, checks of a launch."""

import triton
import triton.language as tl
from torch import Tensor

MAX_ROW = 1 << 16
"""Features that a kernel holds of one row at once, as a power of two; 65,536 float32 are a whole register file."""

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """``x`` (float32) in ``dtype``, half to even: the interpreter's own bfloat16 cuts off, or loses a carry."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        kept = tl.where(x == x, rounded, bits | 0x400000) >> 16
        return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on any device: TRITON_INTERPRET=1 when triton was imported."""
    return bool(INTERPRETED.value)


def choices(*configs: triton.Config) -> list[triton.Config]:
    """What autotuning tries: all of them on a card, the first in the interpreter, which cannot time."""
    return list(configs[:1] if is_interpreted() else configs)


def check_on_device(*tensors: Tensor | None) -> None:
    """Raises ValueError where a kernel could not reach its tensors: off the GPU, or on two of them."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise ValueError(f"tensors lie on several devices: {', '.join(map(str, devices))}")
    if not is_interpreted() and any(device.type != "cuda" for device in devices):
        raise ValueError(
            f"Triton kernels need tensors on a GPU, got {', '.join(map(str, devices))}; on the CPU choose "
            "kernels.backend=auto"
        )


def row_block(width: int, name: str) -> int:
    """The power of two that holds a row of ``width`` features.

    Raises:
        ValueError: no features, or more than ``MAX_ROW``.
    """
    if not 1 <= width <= MAX_ROW:
        raise ValueError(f"{name} must have 1 to {MAX_ROW:,} features, got {width:,}")
    return int(triton.next_power_of_2(width))
