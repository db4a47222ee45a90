"""Measures once what the rooflines need: bandwidths by buffer size, and product rates. T rows, K inputs, N outputs."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tokenrouter.evaluation.ratios import take_turns
from tokenrouter.kernels import NativeKernels, ReferenceKernels, huge_pages
from tokenrouter.telemetry import Provenance

from .case import Turn
from .roofline import Level, Machine
from .shapes import Sizes

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_SECOND_CACHE, _LAST_CACHE = 1 << 20, 32 << 20  # where Linux does not say
_MEMORY_SHARE = 8  # a buffer takes at most this part of the memory


def measure_machine(native: NativeKernels, sizes: Sizes, provenance: Provenance) -> Machine:
    """Everything at its fastest turn: a roofline is what the machine can do."""
    fastest = partial(_fastest_s, turn_s=sizes.turn_s, repeats=sizes.machine_repeats)
    bf16_ops_s, int8_ops_s = _product_rates(native, sizes, fastest)
    return Machine(
        hardware=provenance.hardware_label,
        isa=native.isa,
        threads=provenance.num_threads,
        levels=tuple(_level(num_bytes, fastest) for num_bytes in buffer_bytes(sizes)),
        bf16_ops_s=bf16_ops_s,
        int8_ops_s=int8_ops_s,
    )


def buffer_bytes(sizes: Sizes) -> list[int]:
    """Half of every thread's second cache, the sizes between, and twice the last cache; ascending."""
    second = torch.get_num_threads() * _cache_bytes(2, _SECOND_CACHE) // 2
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    beyond = max(sizes.beyond_bytes, second)
    if sizes.bandwidth_bytes:
        beyond = max(beyond, min(2 * _cache_bytes(3, _LAST_CACHE), memory // _MEMORY_SHARE))
    return sorted({second, beyond, *(b for b in sizes.bandwidth_bytes if second < b < beyond)})


def _cache_bytes(level: int, otherwise: int) -> int:
    """Size of the first processor's cache of a level."""
    for folder in sorted(_CACHES.glob("index*")):
        try:
            if int((folder / "level").read_text()) == level:
                text = (folder / "size").read_text().strip()
                return int(text.removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    return otherwise


def _fastest_s(calls: dict[str, Callable[[], object]], *, turn_s: float, repeats: int) -> float:
    runs = {name: Turn([call], turn_s) for name, call in calls.items()}
    seconds = take_turns(runs, repeats, title="machine")
    return min(min(values) for values in seconds.values())


def _level(num_bytes: int, fastest: Callable[[dict[str, Callable[[], object]]], float]) -> Level:
    whole = torch.empty(num_bytes // 4)
    huge_pages.prefer(whole)
    whole.fill_(1.0)
    source, target = whole.chunk(2)
    read_s = fastest(
        {"sum": whole.sum, "amax": whole.amax, "dot": partial(torch.dot, whole, whole)}
    )
    copy_s = fastest({"copy": partial(target.copy_, source[: target.shape[0]])})
    copied_bytes = 2 * target.numel() * target.element_size()
    return Level(
        num_bytes=num_bytes,
        read_bytes_s=whole.numel() * whole.element_size() / read_s,
        copy_bytes_s=copied_bytes / copy_s,
    )


def _product_rates(
    native: NativeKernels, sizes: Sizes, fastest: Callable[[dict[str, Callable[[], object]]], float]
) -> tuple[float, float]:
    """Operations per second of a large square product, bf16 and int8."""
    x_TK = torch.randn(sizes.rate_rows, sizes.rate_width).bfloat16()
    weight_NK = torch.randn(sizes.rate_width, sizes.rate_width).bfloat16()
    rows, num_ops = native.quantize_rows(x_TK), 2 * x_TK.numel() * sizes.rate_width
    bf16_s = fastest(
        {
            kernels.name: partial(kernels.matmul, x_TK, kernels.pack_matmul(weight_NK, None))
            for kernels in (native, ReferenceKernels())
        }
    )
    q_NK: Tensor = native.quantize_rows(weight_NK).q_TK
    int8_s = fastest(
        {
            "native": partial(native.int8_matmul, rows, native.pack_int8(weight_NK, None)),
            "torch": partial(torch._int_mm, rows.q_TK, q_NK.t()),
        }
    )
    return num_ops / bf16_s, num_ops / int8_s
