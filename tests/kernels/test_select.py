"""Guards the choice of a backend and the build behind it: what is missing is said once, and everything still runs."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks.jobs import compose_config
from tokenrouter import kernels
from tokenrouter.kernels import NativeKernels, select
from tokenrouter.kernels.native import build
from tokenrouter.tasks.checks import check_config

ROOT = Path(__file__).resolve().parents[2]

PROBE = """
import json, warnings
import torch
from tokenrouter.kernels import select
from tokenrouter.kernels.native.build import NativeUnavailable
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    auto = [select("auto", dtype=dtype).name for dtype in (torch.bfloat16, torch.float32)]
try:
    refusal = select("native").name
except NativeUnavailable as error:
    refusal = str(error)
kernels = select()
rows = kernels.quantize_rows(torch.ones(2, 8))
total = float(kernels.int8_matmul(rows, kernels.pack_int8(torch.ones(8, 8), None)).sum())
ours = [str(w.message) for w in caught if "kernels" in str(w.message)]
print(json.dumps({"auto": auto, "refusal": refusal, "warnings": ours, "total": total}))
"""


def in_a_new_process(code: str, **environment: str) -> str:
    """What ``code`` printed last."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_auto_is_native_where_it_has_the_dtype() -> None:
    """A fast path that nobody gets; a dtype that it does not have."""
    assert select("auto").name == select("auto", dtype=torch.float32).name == "native"
    assert isinstance(select("native"), NativeKernels)
    assert select("reference").name == "reference"
    for dtype in (torch.float16, torch.float64):
        assert select("auto", dtype=dtype).name == "reference"
        with pytest.raises(
            ValueError, match=rf"not {dtype}; use kernels\.backend=reference or auto"
        ):
            select("native", dtype=dtype)


def test_an_unknown_backend_lists_the_choices() -> None:
    """A typo on the command line."""
    with pytest.raises(ValueError, match="'nativ'; choose one of: auto, reference, native"):
        select("nativ")


def test_the_instruction_set_can_be_limited_and_put_back(native: NativeKernels) -> None:
    """A measurement of a path that was not taken."""
    order, best = ("plain", "avx2", "avx512", "amx"), native.isa
    for name in order:
        used = native.limit_isa(name)
        assert used == native.isa == min(name, best, key=order.index)
    assert native.limit_isa(best) == best


def test_a_backend_that_there_is_not_is_refused_before_the_model_is_loaded() -> None:
    """A misspelt ``kernels.backend``, named only when the model has been loaded, by an error without the option."""
    cfg = compose_config("debug=tiny", "kernels.backend=nativ")
    with pytest.raises(
        ValueError, match=r"kernels\.backend=nativ is no backend; .*auto.*=native\?"
    ):
        check_config(cfg)
    for backend in kernels.BACKENDS:
        check_config(compose_config("debug=tiny", f"kernels.backend={backend}"))


@pytest.fixture
def unavailable(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the build fail with a reason, for a selection that remembers nothing."""

    def fail(reason: str) -> None:
        def load() -> Any:
            raise build.NativeUnavailable(reason)

        fresh = cache(kernels._native_or_reference.__wrapped__)
        monkeypatch.setattr(build, "load", load)
        monkeypatch.setattr(kernels, "_native_or_reference", fresh)

    return fail


def test_one_warning_says_what_is_missing(unavailable: Callable[[str], None]) -> None:
    """A slow run that nobody was told of; a warning for every engine of a sweep."""
    unavailable("the moon is full")
    with pytest.warns(UserWarning, match="slower reference path runs, since the moon") as caught:
        chosen = [select("auto"), select(), select("auto", dtype=torch.float32)]
    assert {k.name for k in chosen} == {"reference"} and len(caught) == 1
    assert Path(caught[0].filename) == Path(__file__), "the warning names the caller"
    with pytest.raises(build.NativeUnavailable, match="the moon is full"):
        select("native")


def test_what_needs_no_native_kernels_does_not_warn(unavailable: Callable[[str], None]) -> None:
    """Someone who asked for the reference, or for float16, is told of a compiler."""
    unavailable("no compiler")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select("reference").name == "reference"
        assert select("auto", dtype=torch.float16).name == "reference"


def test_no_ninja(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A traceback of the builder instead of what to install."""
    from torch.utils import cpp_extension

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: False)
    with pytest.raises(build.NativeUnavailable, match="ninja is missing: pip install ninja"):
        build.attempt()


def test_a_killed_build_blocks_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Half a library that is loaded (the process dies of it), or a lock that everybody waits for."""
    from torch.utils import cpp_extension

    name = f"tokenrouter_native_{build.fingerprint()}"
    built = Path(cpp_extension._get_build_directory(name, verbose=False)) / f"{name}.so"
    whole = built.read_bytes()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = Path(cpp_extension._get_build_directory(name, verbose=False)) / "build"
    folder.mkdir()
    (folder / f"{name}.so").write_bytes(whole[: len(whole) // 2])
    (folder / "lock").touch()
    builds = []

    def compile_it(**options: Any) -> None:
        builds.append(sorted(path.name for path in folder.iterdir() if path.suffix != ".cpp"))
        (Path(options["build_directory"]) / f"{name}.so").write_bytes(whole)

    monkeypatch.setattr(cpp_extension, "load", compile_it)
    assert build.attempt().isa() and builds == [[]], "nothing of the killed one is left"
    assert build.attempt().isa() and len(builds) == 1, "a whole one is not built again"


def test_no_compiler(tmp_path: Path) -> None:
    """A machine without g++, as most containers are: everything runs, one warning says what is missing."""
    report = json.loads(
        in_a_new_process(PROBE, CXX="/nowhere/g++", TORCH_EXTENSIONS_DIR=str(tmp_path))
    )
    assert report["auto"] == ["reference", "reference"] and report["total"] == 128
    (warning,) = report["warnings"]
    for text in (warning, report["refusal"]):
        assert "no C++ compiler (/nowhere/g++ is not in PATH)" in text and "apt install" in text


def test_a_build_that_fails(tmp_path: Path) -> None:
    """A compiler that cannot build it ends the run with its error instead of the slower path."""
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho unknown flag >&2\nexit 1\n")
    broken.chmod(0o755)
    report = json.loads(
        in_a_new_process(PROBE, CXX=str(broken), TORCH_EXTENSIONS_DIR=str(tmp_path / "ext"))
    )
    assert report["auto"] == ["reference", "reference"] and report["total"] == 128
    (warning,) = report["warnings"]
    assert "the build failed" in warning and "the build failed" in report["refusal"]
    assert "unknown flag" in warning, "the compiler's own words are missing"


def test_a_second_process_loads_what_the_first_built(native: NativeKernels) -> None:
    """A minute of compiling at every start."""
    library = Path(native._module.__file__)
    before = {path: path.stat().st_mtime_ns for path in library.parent.glob("*.[sd]*")}
    assert library in before
    code = "from tokenrouter.kernels import select; print(select('native')._module.__file__)"
    assert in_a_new_process(code) == str(library)
    assert {path: path.stat().st_mtime_ns for path in library.parent.glob("*.[sd]*")} == before


def test_the_fingerprint_follows_the_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An edited header, flag or file name that goes on running the old library."""
    real = build.fingerprint()
    copy = tmp_path / "kernels"
    shutil.copytree(build.KERNELS, copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.setattr(build, "KERNELS", copy)
    assert build.fingerprint() == real and len(build.sources()) >= 9
    seen = {real}
    for pattern in ("*.h", "*.cpp"):
        file = sorted(copy.rglob(pattern))[-1]
        file.write_text(file.read_text() + "\n")
        seen.add(build.fingerprint())
    file.rename(file.with_name("other.cpp"))
    seen.add(build.fingerprint())
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    seen.add(build.fingerprint())
    assert len(seen) == 5
