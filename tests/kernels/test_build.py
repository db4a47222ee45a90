"""Guards the library of the native operators: a damaged one is never loaded, errors of a build are true."""

import hashlib
import json
import os
import platform
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.test_select import in_a_new_process
from tokenrouter.kernels import NativeKernels
from tokenrouter.kernels.native import build, compiler

WORKS = """
import torch
from tokenrouter.kernels import select
kernels = select("native")
rows = kernels.quantize_rows(torch.ones(2, 8))
assert float(kernels.int8_matmul(rows, kernels.pack_int8(torch.ones(8, 8), None)).sum()) == 128
print(kernels._module.__file__)
"""


@pytest.fixture
def built(native: NativeKernels) -> Path:
    """The library that this process uses."""
    return Path(native._module.__file__)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, built: Path) -> list[str]:
    """An empty folder for extensions, and a builder that copies what is built already; grows by a name per build."""
    from torch.utils import cpp_extension

    whole, names = built.read_bytes(), []

    def compile_it(**options: Any) -> None:
        names.append(options["name"])
        (Path(options["build_directory"]) / built.name).write_bytes(whole)

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "load", compile_it)
    return names


def put(library: Path, data: bytes) -> None:
    """In a file of its own: this process may have mapped the one that is there."""
    library.unlink()
    library.write_bytes(data)


def cut_short(library: Path) -> None:
    put(library, library.read_bytes()[:5000])


def flip_a_byte(library: Path) -> None:
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    put(library, bytes(data))


def without_digest(library: Path) -> None:
    library.with_suffix(".digest").unlink()


DAMAGES: list[Callable[[Path], None]] = [cut_short, flip_a_byte, without_digest]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_built_again(
    builds: list[str], tmp_path: Path, built: Path, damage: Callable[[Path], None]
) -> None:
    """A bus error at the first call, or native switched off for ever, after a full disk or a broken copy."""
    assert build.attempt().isa() and len(builds) == 1
    (library,) = tmp_path.glob(f"*/{built.name}")
    damage(library)
    assert build.attempt().isa() and len(builds) == 2
    assert library.read_bytes() == built.read_bytes()
    assert build.attempt().isa() and len(builds) == 2, "the mended one is not built again"


def test_a_library_that_the_loader_refuses_is_built_again(
    builds: list[str], tmp_path: Path, built: Path
) -> None:
    """Whole by its digest, and for another machine: native switched off for ever by an ImportError."""
    library, data = tmp_path / built.parent.name / built.name, b"not a library"
    library.parent.mkdir()
    library.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    library.with_suffix(".digest").write_text(f"{len(data)} {digest}\n")
    assert build.attempt().isa() and len(builds) == 1
    assert library.read_bytes() == built.read_bytes()


def test_a_damaged_library_that_cannot_be_built_again(
    builds: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, built: Path
) -> None:
    """A message about the build alone: nobody then looks at the library."""
    from torch.utils import cpp_extension

    def fail(**_: Any) -> None:
        raise RuntimeError("no space for objects")

    build.attempt()
    (library,) = tmp_path.glob(f"*/{built.name}")
    cut_short(library)
    monkeypatch.setattr(cpp_extension, "load", fail)
    with pytest.raises(build.NativeUnavailable, match=r"is damaged.*the build failed:\nno space"):
        build.attempt()


def test_a_damaged_library_is_not_loaded(tmp_path: Path, built: Path) -> None:
    """A library cut short, as a full disk leaves it: loading it ends the process by a bus error."""
    copy = tmp_path / built.parent.name
    copy.mkdir()
    for file in (built, built.with_suffix(".digest")):
        shutil.copy(file, copy)
    cut_short(copy / built.name)
    code = "from tokenrouter.kernels import select; print(select().name)"
    used = in_a_new_process(code, CXX="/nowhere/g++", TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert used == "reference"


def test_a_library_needs_no_compiler(tmp_path: Path, built: Path) -> None:
    """An image with the library and without a compiler, whose version then differs from the one that built it."""
    copy = tmp_path / built.parent.name
    copy.mkdir()
    for file in (built, built.with_suffix(".digest")):
        shutil.copy(file, copy)
    used = in_a_new_process(WORKS, CXX="/nowhere/g++", TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert used == str(copy / built.name)


def test_the_fingerprint_follows_machine_and_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder in a home that two kinds of machine share; a library that an old compiler got wrong."""
    real = build.fingerprint()
    assert compiler.version(), "the compiler's version is part of it"
    monkeypatch.setattr(platform, "machine", lambda: "riscv128")
    elsewhere = build.fingerprint()
    monkeypatch.undo()
    other = program(tmp_path / "g++", "echo g++ 99.1")
    monkeypatch.setenv("CXX", str(other))
    newer = build.fingerprint()
    assert elsewhere.split("_")[0] != real.split("_")[0] == newer.split("_")[0]
    assert elsewhere.split("_")[1] == real.split("_")[1] != newer.split("_")[1]


def program(path: Path, line: str) -> Path:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize("words", ["env {}", "env -u NOTHING {}", "'{} x'"])
def test_a_compiler_of_several_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str
) -> None:
    """``CXX="ccache g++"``, or a compiler in a folder with a blank: torch's builder takes it for one program's name."""
    echo = program(tmp_path / "my-g++", 'echo "$@"')
    program(tmp_path / "my-g++ x", 'echo "$@"')
    before = words.format(echo)
    monkeypatch.setenv("CXX", before)
    path = os.environ["PATH"]
    with compiler.environment(tmp_path / "build"):
        assert " " not in os.environ["CXX"]
        found = shutil.which(os.environ["CXX"])
        assert found is not None and os.popen(f"{os.environ['CXX']} -c 'a b'").read() == "-c a b\n"
    assert os.environ["CXX"] == before and os.environ["PATH"] == path


def test_torch_builds_with_a_compiler_of_several_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A script that works in a shell, and that torch's builder refuses all the same."""
    source = tmp_path / "op" / "one.cpp"
    source.parent.mkdir()
    source.write_text('#include <Python.h>\nextern "C" int one() { return 1; }\n')
    monkeypatch.setattr(build, "sources", lambda: [source])
    monkeypatch.setattr(build, "KERNELS", tmp_path)
    monkeypatch.setenv("CXX", "env g++")
    build._build("one", tmp_path / "build")
    assert (tmp_path / "build" / "one.so").exists()
    torch.ops.load_library(str(tmp_path / "build" / "one.so"))


def test_a_command_line_that_is_none(tmp_path: Path) -> None:
    """A ValueError of the parser out of ``select("auto")``, which always has an answer."""
    probe = """
import json, warnings
from tokenrouter.kernels import select
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    name = select("auto").name
print(json.dumps([name, *(str(w.message) for w in caught if "kernels" in str(w.message))]))
"""
    name, warning = json.loads(
        in_a_new_process(probe, CXX='g++ "', TORCH_EXTENSIONS_DIR=str(tmp_path))
    )
    assert name == "reference"
    assert "CXX='g++ \"' is no command line (No closing quotation)" in warning
    assert "set it to a C++ compiler" in warning


@pytest.mark.parametrize(
    ("error", "hints"),
    [
        (PermissionError(13, "Permission denied"), True),
        (OSError(30, "Read-only file system"), True),
        (OSError(28, "No space left on device"), False),
        (FileNotFoundError(2, "No such file or directory"), False),
    ],
)
def test_only_what_is_not_writable_is_said_to_be(
    builds: list[str], monkeypatch: pytest.MonkeyPatch, error: OSError, hints: bool
) -> None:
    """A full disk, and the advice to make a folder writable that is."""
    from torch.utils import cpp_extension

    def fail(**_: Any) -> None:
        raise error

    monkeypatch.setattr(cpp_extension, "load", fail)
    with pytest.raises(build.NativeUnavailable, match=str(error.strerror)) as raised:
        build.attempt()
    assert ("must be writable" in str(raised.value)) is hints and not builds


def test_every_refusal_has_the_compilers_words(tmp_path: Path) -> None:
    """The second call in a process, which torch's builder answers with a missing file."""
    probe = """
import json
from tokenrouter.kernels import NativeUnavailable, select
found = []
for _ in range(3):
    try:
        select("native")
    except NativeUnavailable as error:
        found.append(str(error))
print(json.dumps(found))
"""
    broken = program(tmp_path / "g++", "echo unknown flag >&2\nexit 1")
    found = json.loads(
        in_a_new_process(probe, CXX=str(broken), TORCH_EXTENSIONS_DIR=str(tmp_path / "ext"))
    )
    assert len(found) == 3 and len(set(found)) == 1
    assert "the build failed" in found[0] and "unknown flag" in found[0]
