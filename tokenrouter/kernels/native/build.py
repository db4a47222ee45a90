"""Builds the native operators once, by torch's extension builder, and loads them.

The library is cached under torch's extension folder, named by the hash of the sources, torch's version and the
compiler: another source or torch builds another one.
"""

import hashlib
import os
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

KERNELS = Path(__file__).resolve().parents[1]
FLAGS = (
    "-std=c++20",
    "-O3",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",
    "-Wno-unknown-pragmas",
)


class NativeUnavailable(RuntimeError):
    """Why the native operators cannot be had here, and what to do."""


def sources() -> list[Path]:
    """The C++ files, sorted."""
    return sorted(KERNELS.rglob("*.cpp"))


def fingerprint() -> str:
    """Hash of sources, headers, flags, torch's version and the Python ABI."""
    digest = hashlib.sha256(repr((torch.__version__, sys.implementation.cache_tag, FLAGS)).encode())
    for path in sorted([*KERNELS.rglob("*.cpp"), *KERNELS.rglob("*.h")]):
        digest.update(path.relative_to(KERNELS).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _units(folder: Path) -> list[str]:
    """One file per source under a name of its own: objects are named by it, and every operator has a native.cpp."""
    units = []
    for path in sources():
        relative = path.relative_to(KERNELS)
        unit = folder / "_".join(relative.parts)
        text = f'#include "{relative.as_posix()}"\n'
        if not unit.exists() or unit.read_text() != text:
            unit.write_text(text)
        units.append(str(unit))
    return units


@cache
def load() -> Any:
    """The compiled module; built on the first call of the first process. Raises NativeUnavailable with the reason."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise NativeUnavailable(
            f"no C++ compiler ({compiler} is not in PATH): install one, on Debian `apt install g++`"
        )
    from torch.utils import (
        cpp_extension,
    )  # imports setuptools: only where something is built or loaded

    if not cpp_extension.is_ninja_available():
        raise NativeUnavailable("ninja is missing: pip install ninja")
    name = f"tokenrouter_native_{fingerprint()}"
    try:
        folder = Path(cpp_extension._get_build_directory(name, verbose=False))
        return cpp_extension.load(
            name=name,
            sources=_units(folder),
            build_directory=str(folder),
            extra_cflags=list(FLAGS),
            extra_ldflags=["-fopenmp"],
            extra_include_paths=[str(KERNELS)],
        )
    except (RuntimeError, OSError, ImportError) as error:
        raise NativeUnavailable(f"the build failed:\n{error}") from error
