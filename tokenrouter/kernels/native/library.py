"""The built library as a file: put in its place as a whole, and loaded only when it is what was built.

A damaged library ends the process that loads it, so its size and SHA-256 are compared first.
"""

import hashlib
import importlib.util
from pathlib import Path
from typing import Any


def load(path: Path) -> Any:
    """The module of the library at ``path``; None where it is missing, damaged, or refused by the loader."""
    try:
        if _record(path).read_text() == _digest(path):
            return _import(path)
    except (OSError, ValueError, ImportError):  # built again, and if that fails, the build says why
        return None
    return None


def install(built: Path, path: Path) -> Any:
    """Moves the library ``built`` to ``path``, with its digest, and returns its module.

    Raises:
        OSError: the folder cannot be written to, or there was nothing built.
        ImportError: the loader refuses the library; the message says what to do.
    """
    digest = _digest(built)
    written = built.with_suffix(".digest")
    written.write_text(digest)
    written.replace(_record(path))
    built.replace(path)
    try:
        return _import(path)
    except ImportError as error:
        raise ImportError(
            f"the library that was just built cannot be loaded ({error}): the compiler (CXX) must be one for this "
            "Python and torch"
        ) from error


def _record(path: Path) -> Path:
    return path.with_suffix(".digest")


def _digest(path: Path) -> str:
    data = path.read_bytes()
    return f"{len(data)} {hashlib.sha256(data).hexdigest()}\n"


def _import(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"not an extension module: {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
