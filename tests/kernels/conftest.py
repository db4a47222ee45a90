"""Every backend of the hot operators, under one name."""

import pytest

from tokenrouter.kernels import BACKENDS, KernelSet, select

SETS = {kernels.name: kernels for kernels in map(select, BACKENDS)}


@pytest.fixture(params=sorted(SETS))
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    """One backend; ``auto`` is whichever of them it chose."""
    return SETS[request.param]
