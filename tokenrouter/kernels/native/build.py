"""Builds the native operators once, by torch's extension builder, and loads them.

The library lies under torch's extension folder (TORCH_EXTENSIONS_DIR, by default in the user's cache), in a folder
named by the hash of sources, flags, torch and Python: other sources or another torch build another one. A library that
is there is loaded without a compiler.

``python -m tokenrouter.kernels.native`` builds it ahead of the first use and says what it found.
"""

import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    "-Wno-uninitialized",
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
    what = (torch.__version__, sys.implementation.cache_tag, FLAGS)
    digest = hashlib.sha256(repr(what).encode())
    for path in sorted([*KERNELS.rglob("*.cpp"), *KERNELS.rglob("*.h")]):
        digest.update(path.relative_to(KERNELS).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def load() -> Any:
    """The compiled module; the first call on a machine builds it, which takes about a minute.

    Raises:
        NativeUnavailable: no compiler, or a build that fails; with the reason and what to do.
    """
    name = f"tokenrouter_native_{fingerprint()}"
    from torch.utils import cpp_extension  # imports setuptools: only here

    try:
        folder = Path(cpp_extension._get_build_directory(name, verbose=False))
        library = folder / f"{name}.so"
        if library.exists():  # needs no lock: it appears as a whole
            return _import(name, library)
        with _one_builder(folder):
            if not library.exists():
                _build(cpp_extension, name, folder / "build")
                (folder / "build" / library.name).replace(library)  # whole, or not there
            return _import(name, library)
    except (RuntimeError, OSError, ImportError) as error:
        if isinstance(error, NativeUnavailable):
            raise
        hint = ""
        if isinstance(error, OSError):
            hint = " (TORCH_EXTENSIONS_DIR names the folder for the library: it must be writable)"
        raise NativeUnavailable(f"the build failed:\n{error}{hint}") from error


def _build(cpp_extension: Any, name: str, folder: Path) -> None:
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]  # may be "ccache g++"
    if shutil.which(compiler[0]) is None:
        raise NativeUnavailable(
            f"no C++ compiler ({compiler[0]} is not in PATH): install one, on Debian `apt install g++`"
        )
    with _ninja_in_path():
        if not cpp_extension.is_ninja_available():
            raise NativeUnavailable("ninja is missing: pip install ninja")
        shutil.rmtree(folder, ignore_errors=True)  # what a killed build left, its lock too
        folder.mkdir()
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


def _import(name: str, library: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, library)
    if spec is None or spec.loader is None:
        raise ImportError(f"not an extension module: {library}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


@contextmanager
def _ninja_in_path() -> Iterator[None]:
    """Beside this interpreter, where pip puts it, also when its environment is not activated."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), before))
    try:
        yield
    finally:
        os.environ["PATH"] = before
