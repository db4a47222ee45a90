"""Guards what the interpreter cannot show: that every kernel compiles for the cards, and fits into them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tokenrouter.kernels.triton.builds import OPERATORS

KERNELS = Path(__file__).resolve().parents[2] / "tokenrouter" / "kernels"


@pytest.mark.slow
def test_every_kernel_compiles_and_fits(tmp_path: Path) -> None:
    """A type that only the interpreter takes, a tile too large for shared memory, registers that spill."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tokenrouter.kernels.triton"],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    lines = run.stdout.splitlines()
    for operator in OPERATORS:
        for capability in (80, 90):
            assert any(re.match(rf"sm_{capability} fits: {operator} ", line) for line in lines)


def test_no_operator_is_left_out() -> None:
    """A new triton.py that nothing compiles."""
    found = {path.parent.name for path in KERNELS.glob("*/triton.py")}
    assert found == set(OPERATORS)
