"""Memory of this process, now and at its peak, and of the machine."""

import ctypes
import gc
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
_STATM = Path("/proc/self/statm")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def machine_bytes() -> int | None:
    """Physical memory of this machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def process_bytes() -> int:
    """Resident size of this process now.

    Raises:
        OSError: the system is not Linux.
    """
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()


def peak_process_bytes() -> int:
    """Largest resident size of this process so far: VmHWM on Linux, ``getrusage`` elsewhere."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_process_bytes() -> bool:
    """Start the peak anew, so that a job of a sweep reports its own; False where it can't.

    Memory that was freed is given back to the system first: the allocator keeps it, and the peak
    would start with what the jobs before this one needed.
    """
    gc.collect()
    with suppress(OSError, AttributeError):  # glibc's own; no other C library has it
        ctypes.CDLL(None).malloc_trim(0)
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True
