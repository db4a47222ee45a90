"""Builds the native operators once, by torch's extension builder, and loads them.

The library lies under torch's extension folder (TORCH_EXTENSIONS_DIR, by default in the user's cache), in a folder
named by the hashes of sources, flags, torch, Python and machine, and of the compiler: others build another one. Its
size and SHA-256 lie beside it: one that is damaged is built again, never loaded. One that is there is loaded without
a compiler.

``python -m tokenrouter.kernels.native`` builds it ahead of the first use and says what it found.
"""

import errno
import fcntl
import hashlib
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tokenrouter.kernels.native import compiler, library
from tokenrouter.kernels.native.compiler import NativeUnavailable

KERNELS = Path(__file__).resolve().parents[1]
FLAGS = (
    "-std=c++20",
    "-O3",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
    "-Wno-unknown-pragmas",
)

__all__ = ["NativeUnavailable", "attempt", "fingerprint", "load", "sources"]


def sources() -> list[Path]:
    """The C++ files, sorted."""
    return sorted(KERNELS.rglob("*.cpp"))


def fingerprint() -> str:
    """Two hashes: of sources, headers, flags, torch's version, Python's ABI and the machine; and of the compiler."""
    what = (torch.__version__, sys.implementation.cache_tag, platform.machine(), FLAGS)
    digest = hashlib.sha256(repr(what).encode())
    for path in sorted([*KERNELS.rglob("*.cpp"), *KERNELS.rglob("*.h")]):
        digest.update(path.relative_to(KERNELS).as_posix().encode())
        digest.update(path.read_bytes())
    builder = hashlib.sha256(compiler.version().encode())
    return f"{digest.hexdigest()[:16]}_{builder.hexdigest()[:8]}"


def load() -> Any:
    """The compiled module; the first call on a machine builds it, which takes about a minute.

    Torch's builder works once per process, so the outcome of the first call is also that of the later ones.

    Raises:
        NativeUnavailable: no compiler, or a build that fails; with the reason and what to do.
    """
    outcome = _outcome()
    if isinstance(outcome, NativeUnavailable):
        raise NativeUnavailable(str(outcome)) from outcome
    return outcome


@cache
def _outcome() -> Any:
    try:
        return attempt()
    except NativeUnavailable as error:
        return error


def attempt() -> Any:
    """``load``, which remembers nothing."""
    try:
        return _load_or_build()
    except (RuntimeError, OSError, ImportError) as error:
        if isinstance(error, NativeUnavailable):
            raise
        raise NativeUnavailable(f"{error}{_remedy(error)}") from error


def _load_or_build() -> Any:
    from torch.utils import cpp_extension  # imports setuptools: only here

    name = f"tokenrouter_native_{fingerprint()}"
    folder = Path(cpp_extension._get_build_directory(name, verbose=False))
    path = folder / f"{name}.so"
    module = library.load(path)  # needs no lock: it appears as a whole
    if module is None and not compiler.found():
        module = _of_another_compiler(path)
    if module is not None:
        return module
    with _one_builder(folder):
        module = library.load(path)  # what another process has built meanwhile
        if module is None:
            again = f"{path} is damaged or cannot be loaded, and " if path.exists() else ""
            try:
                _build(name, folder / "build")
            except NativeUnavailable:
                raise
            except (RuntimeError, OSError, ImportError) as error:
                raise NativeUnavailable(
                    f"{again}the build failed:\n{error}{_remedy(error)}"
                ) from error
            module = library.install(folder / "build" / path.name, path)
        return module


def _of_another_compiler(path: Path) -> Any:
    """The same sources, built where there was a compiler; None: there is no such library."""
    name = path.stem.rpartition("_")[0]
    for other in sorted(path.parent.parent.glob(f"{name}_*/{name}_*.so")):
        module = library.load(other)
        if module is not None:
            return module
    return None


def _build(name: str, folder: Path) -> None:
    from torch.utils import cpp_extension

    with compiler.environment(folder):
        if not cpp_extension.is_ninja_available():
            raise NativeUnavailable("ninja is missing: pip install ninja")
        print("building the native kernels, once: about a minute", file=sys.stderr, flush=True)
        cpp_extension.load(
            name=name,
            sources=_units(folder),
            build_directory=str(folder),
            extra_cflags=list(FLAGS),
            extra_ldflags=["-fopenmp"],
            extra_include_paths=[str(KERNELS)],
            is_python_module=False,
            is_standalone=False,
            keep_intermediates=False,
        )


def _remedy(error: Exception) -> str:
    """What to do about a folder that cannot be written to; nothing for other errors, which say it themselves."""
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return " (TORCH_EXTENSIONS_DIR names the folder for the library: it must be writable)"
    return ""


def _units(folder: Path) -> list[str]:
    """One file per source under a name of its own: objects are named by it, and every operator has a native.cpp."""
    units = []
    for path in sources():
        relative = path.relative_to(KERNELS)
        unit = folder / "_".join(relative.parts)
        unit.write_text(f'#include "{relative.as_posix()}"\n')
        units.append(str(unit))
    return units


@contextmanager
def _one_builder(folder: Path) -> Iterator[None]:
    """Others wait; the lock goes with the process, so that a killed build blocks nobody."""
    with (folder / "builder").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
