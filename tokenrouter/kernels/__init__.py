"""The hot operators, one folder each, behind one contract (``base.KernelSet``).

``reference.py`` in each folder is torch and defines the result; ``native.cpp`` is the CPU's. ``select`` returns a
backend as one value that is handed to executors and decoder; nothing is chosen globally.
"""

import warnings
from functools import cache

import torch

from tokenrouter.kernels.base import KernelSet
from tokenrouter.kernels.layer_tail import TailWeights
from tokenrouter.kernels.native import build
from tokenrouter.kernels.native.build import NativeUnavailable
from tokenrouter.kernels.native.kernels import NativeKernels
from tokenrouter.kernels.native.rows import DTYPES as NATIVE_DTYPES
from tokenrouter.kernels.reference import ReferenceKernels
from tokenrouter.kernels.values import (
    AttentionPlan,
    BinRows,
    Cut,
    Int8Entries,
    LayerTail,
    Norm,
    PackedWeights,
    Product,
    QuantizedRows,
    RouterTable,
    WeightFormat,
)

__all__ = [
    "BACKENDS",
    "AttentionPlan",
    "BinRows",
    "Cut",
    "Int8Entries",
    "KernelSet",
    "LayerTail",
    "NativeKernels",
    "NativeUnavailable",
    "Norm",
    "PackedWeights",
    "Product",
    "QuantizedRows",
    "ReferenceKernels",
    "RouterTable",
    "TailWeights",
    "WeightFormat",
    "select",
]

BACKENDS = ("auto", "reference", "native")


def select(backend: str = "auto", *, dtype: torch.dtype = torch.bfloat16) -> KernelSet:
    """The operators of ``backend`` for a model of ``dtype``.

    ``auto`` is native where it can be built and has the dtype, else the reference, with one warning that says what is
    missing. The first use on a machine builds the native operators, which takes about a minute.

    Raises:
        ValueError: an unknown backend (with the choices), or one that does not have the dtype.
        NativeUnavailable: ``native`` cannot be built here; the message says why and what to do.
    """
    if backend not in BACKENDS:
        raise ValueError(
            f"unknown kernel backend {backend!r}; choose one of: {', '.join(BACKENDS)}"
        )
    if backend == "reference" or (backend == "auto" and dtype not in NATIVE_DTYPES):
        return ReferenceKernels()
    if dtype not in NATIVE_DTYPES:
        raise ValueError(
            f"the native kernels have bfloat16 and float32, not {dtype}; use kernels.backend=reference or auto"
        )
    if backend == "native":
        return NativeKernels(build.load())
    return _native_or_reference()


@cache
def _native_or_reference() -> KernelSet:
    try:
        return NativeKernels(build.load())
    except build.NativeUnavailable as error:
        warnings.warn(f"kernels: the slower reference path runs, since {error}", stacklevel=3)
        return ReferenceKernels()
