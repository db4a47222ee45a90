"""Pages of memory: huge ones for what every step streams (weights, the KV arena), and giving back what is not needed.

A decode step reads every weight once. With 4 KiB pages the processor walks page tables all along, in a virtual machine
twice over; with 2 MiB pages the token-wise operators of a small model took a quarter less time (experiments/LOG.md).
Linux only; where the kernel refuses, nothing changes.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

_MADV_DONTNEED, _MADV_HUGEPAGE, _MADV_COLLAPSE = 4, 14, 25
_PAGE_BYTES = 1 << 21


def collapse(tensors: Iterable[Tensor]) -> int:
    """Moves the memory behind ``tensors`` (in use, CPU) to huge pages now; returns the bytes that moved."""
    starts = sorted({page for tensor in tensors for page in _pages(tensor)})
    return sum(_PAGE_BYTES for start in starts if _madvise(start, _PAGE_BYTES, _MADV_COLLAPSE))


def prefer(tensor: Tensor) -> bool:
    """Asks for huge pages where ``tensor``'s memory is touched first from now on."""
    pages = _pages(tensor)
    return bool(pages) and _madvise(pages[0], len(pages) * _PAGE_BYTES, _MADV_HUGEPAGE)


def give_back(tensor: Tensor) -> int:
    """Returns the whole (small) pages inside a CPU tensor's memory to the system; what was in them reads as zero.

    Returns:
        The bytes that may have been resident; 0 where the system does not take them back (then nothing changes).
    """
    size = mmap.PAGESIZE
    first = -(-tensor.data_ptr() // size) * size
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // size * size
    if tensor.device.type != "cpu" or end <= first:
        return 0
    return end - first if _madvise(first, end - first, _MADV_DONTNEED) else 0


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
