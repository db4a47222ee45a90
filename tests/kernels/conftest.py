"""Every backend of the hot operators, the native one on every instruction set."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from tokenrouter.kernels import KernelSet, NativeKernels, ReferenceKernels, select
from tokenrouter.kernels.triton.kernels import TritonKernels

LEVELS = ("plain", "avx2", "avx512", "amx")  # a processor without a level uses the one below
NATIVE_DTYPES = (torch.float32, torch.bfloat16)
ALL_DTYPES = (*NATIVE_DTYPES, torch.float16)


class Typed(NamedTuple):
    """A backend and a dtype that it has."""

    kernels: KernelSet
    dtype: torch.dtype


TYPED = [
    *((name, dtype) for name in LEVELS for dtype in NATIVE_DTYPES),
    *((name, dtype) for name in ("reference", "triton") for dtype in ALL_DTYPES),
]


def backend(name: str, native: NativeKernels) -> KernelSet:
    """The reference, Triton's interpreter, or ``native`` limited to an instruction set."""
    if name == "reference":
        return ReferenceKernels()
    if name == "triton":
        return TritonKernels()
    native.limit_isa(name)
    return native


@pytest.fixture
def native() -> Iterator[NativeKernels]:
    """The native backend; the instruction set and the number of threads are put back after the test."""
    kernels = select("native")
    assert isinstance(kernels, NativeKernels)
    best, threads = kernels.isa, torch.get_num_threads()
    yield kernels
    kernels.limit_isa(best)
    torch.set_num_threads(threads)


@pytest.fixture(params=["reference", "triton", *LEVELS])
def kernels(request: pytest.FixtureRequest, native: NativeKernels) -> KernelSet:
    """The reference, Triton's interpreter, or the native backend limited to an instruction set."""
    return backend(request.param, native)


@pytest.fixture(params=TYPED, ids=lambda pair: f"{pair[0]}-{str(pair[1])[6:]}")
def typed(request: pytest.FixtureRequest, native: NativeKernels) -> Typed:
    """Every backend with every dtype that it has."""
    name, dtype = request.param
    return Typed(backend(name, native), dtype)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, native: NativeKernels) -> NativeKernels:
    """The native backend limited to an instruction set, for tests that compare it with the reference."""
    native.limit_isa(request.param)
    return native
