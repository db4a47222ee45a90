"""Guards the process: no argument of an operator, however odd, ends it or changes memory outside of a result."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("seed", [1, 2])
def test_no_crash(seed: int) -> None:
    """A division by a width of zero, a slot or row that is not checked, a write beyond the last row."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.kernels.attack", str(seed), "1400"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    counts = [int(word) for word in done.stdout.split()]
    assert len(counts) == 20 and min(counts) > 0, "every operator must have accepted and refused"
