"""Peak memory of this process."""

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


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
    """Start the peak anew, so that a job of a sweep reports its own; False where it can't."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True
