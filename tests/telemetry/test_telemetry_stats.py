"""Guards against wrong percentiles, and against a mean over nothing that looks like a number."""

import os
from pathlib import Path

import pytest

from tokenrouter.telemetry import peak_process_bytes, percentiles, reset_peak_process_bytes, spread


def test_percentiles_of_known_values() -> None:
    result = percentiles(float(value) for value in range(101))
    assert result == {"mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0}


def test_percentiles_of_nothing_are_none_not_nan() -> None:
    assert percentiles([]) is None


def test_spread_is_the_median_not_the_mean() -> None:
    result = spread([1.0, 2.0, 30.0])
    assert (result.median, result.min, result.max) == (2.0, 1.0, 30.0)


def test_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        spread([])


def test_peak_bytes_are_bytes_not_kilobytes() -> None:
    block = bytearray(200_000_000)
    assert peak_process_bytes() > len(block)


def test_peak_can_start_anew() -> None:
    block = bytearray(300_000_000)
    before = peak_process_bytes()
    del block
    if not reset_peak_process_bytes():
        pytest.skip("/proc/self/clear_refs can't be written here")
    assert peak_process_bytes() < before - 200_000_000


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_new_peak_starts_without_what_was_freed_before() -> None:
    """The allocator keeps freed blocks: a sweep's third job reported 400 MB of the first two."""
    blocks = [b"x" * 65_536 for _ in range(5_000)]
    pin = b"x" * 65_536  # above them in the heap, so that it can't shrink from its end
    before = _resident_bytes()
    del blocks
    reset_peak_process_bytes()
    assert _resident_bytes() < before - 200_000_000
    assert pin
