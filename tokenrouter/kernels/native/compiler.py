"""The C++ compiler that builds the native operators: ``CXX``, which may be several words, else ``c++``."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NativeUnavailable(RuntimeError):
    """Why the native operators cannot be had here, and what to do."""


def command() -> list[str]:
    """The words of the compiler's call, such as ``["ccache", "g++"]``.

    Raises:
        NativeUnavailable: ``CXX`` is no command line.
    """
    given = os.environ.get("CXX", "")
    try:
        return shlex.split(given) or ["c++"]
    except ValueError as error:
        raise NativeUnavailable(
            f"CXX={given!r} is no command line ({error}): set it to a C++ compiler, such as g++ or 'ccache g++'"
        ) from error


def found() -> bool:
    """Whether the compiler's first word is a program in PATH."""
    return shutil.which(command()[0]) is not None


def version() -> str:
    """What the compiler says of its version; empty where there is none."""
    if not found():
        return ""
    try:
        done = subprocess.run([*command(), "--version"], capture_output=True, check=False)
    except OSError:  # a program of another machine, or no program: the build says so
        return ""
    return done.stdout.decode(errors="replace")


@contextmanager
def environment(folder: Path) -> Iterator[None]:
    """Empties ``folder`` and sets PATH and CXX to what torch's builder needs, as long as it builds there.

    Ninja lies beside this interpreter, where pip puts it, also when its environment is not activated. A compiler of
    several words, or with a blank in its path, becomes a script, since the builder takes one word.

    Raises:
        NativeUnavailable: there is no compiler.
    """
    words = command()
    if not found():
        raise NativeUnavailable(
            f"no C++ compiler ({words[0]} is not in PATH): install one, on Debian `apt install g++`"
        )
    shutil.rmtree(folder, ignore_errors=True)  # what a killed build left, its lock too
    folder.mkdir()
    before = {name: os.environ.get(name) for name in ("PATH", "CXX")}
    paths = [str(Path(sys.executable).parent), before["PATH"] or ""]
    if len(words) > 1 or " " in words[0]:
        script = folder / f"one-word-{Path(words[-1]).name.replace(' ', '-')}"
        script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        script.chmod(0o755)
        os.environ["CXX"] = script.name
        paths.insert(0, str(folder))
    os.environ["PATH"] = os.pathsep.join(paths)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
