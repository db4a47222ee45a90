"""Huge pages for memory that every step streams: weights and the KV arena.

A decode step reads every weight once. With 4 KiB pages the processor walks page tables all along, in a virtual machine
twice over; with 2 MiB pages the token-wise operators of a small model took a quarter less time (experiments/LOG.md).
Linux only; where the kernel refuses, nothing changes.
"""

import ctypes
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_PAGE_BYTES = 1 << 21


def collapse(tensors: Iterable[Tensor]) -> int:
    """Moves the memory behind ``tensors`` (in use, CPU) to huge pages now; returns the bytes that moved."""
    starts = sorted({page for tensor in tensors for page in _pages(tensor)})
    return sum(_PAGE_BYTES for start in starts if _madvise(start, _PAGE_BYTES, _MADV_COLLAPSE))


def prefer(tensor: Tensor) -> bool:
    """Asks for huge pages where ``tensor``'s memory is touched first from now on."""
    pages = _pages(tensor)
    return bool(pages) and _madvise(pages[0], len(pages) * _PAGE_BYTES, _MADV_HUGEPAGE)


def _pages(tensor: Tensor) -> range:
    """Addresses of the huge pages that overlap the tensor; none for a tensor of less than half a page."""
    if tensor.is_mkldnn:
        address, num_bytes = torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    else:
        address, num_bytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    if tensor.device.type != "cpu" or num_bytes < _PAGE_BYTES // 16:
        return range(0)
    return range(address // _PAGE_BYTES * _PAGE_BYTES, address + num_bytes, _PAGE_BYTES)


def _madvise(address: int, num_bytes: int, advice: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice) == 0)
