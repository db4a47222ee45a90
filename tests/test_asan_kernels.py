"""The sanitizer script, run for real with a stub interpreter: what it builds with, and when it fails."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# `python -c` builds and prints the library; `python -m pytest` reports STUB_FINDING as its sanitizer does.
STUB = """#!/bin/bash
if [[ $1 == -c ]]; then
    echo "int f(int* p) { return *p; }" | "$CXX" -shared -fPIC -x c++ - -o "$PWD/library.so"
    [[ -z $STUB_PLAIN ]] || : >"$PWD/library.so"
    echo "$PWD/library.so"
    exit
fi
echo "ran: $* preload: $LD_PRELOAD"
log=${ASAN_OPTIONS##*log_path=} log=${log//\\'/}
if [[ $STUB_FINDING == SUMMARY* ]]; then exec 2>"$log.17"; fi
[[ -z $STUB_FINDING ]] || printf '%s\\n' "$STUB_FINDING" "$STUB_FINDING" >&2
exit "${STUB_CODE:-0}"
"""


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A space in the path, as people have."""
    folder = tmp_path / "my clone"
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/asan_kernels.sh", folder / "scripts")
    stub = folder / ".venv/bin/python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    return folder


def run(repo: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(repo / "scripts/asan_kernels.sh"), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_clean_tests_pass(repo: Path) -> None:
    """Arguments that are lost; tests without the sanitizer in the process."""
    done = run(repo, "-k", "silu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "found nothing" in done.stdout
    assert "ran: -m pytest -q -s -p no:faulthandler tests/kernels -k silu preload: /" in done.stdout
    assert "libasan" in done.stdout and "libubsan" in done.stdout


@pytest.mark.parametrize(
    "finding",
    [
        "SUMMARY: AddressSanitizer: heap-buffer-overflow rows.h:3 in body",
        "gemm.cpp:7:5: runtime error: signed integer overflow",
    ],
)
def test_a_finding_fails_though_the_tests_pass(repo: Path, finding: str) -> None:
    """The sanitizers report and go on: pytest ends with 0 and CI is green."""
    done = run(repo, STUB_FINDING=finding)
    assert done.returncode == 1
    assert f"2 {finding.removeprefix('SUMMARY: ')}" in done.stdout
    assert run(repo).returncode == 0, "an old report counts for the next run"


def test_a_test_that_fails_is_the_script_s_code(repo: Path) -> None:
    """A crash without a report."""
    assert run(repo, STUB_CODE="3").returncode == 3


def test_a_library_without_the_sanitizer_is_refused(repo: Path) -> None:
    """A clean run of an operator that was never instrumented."""
    done = run(repo, STUB_PLAIN="1")
    assert done.returncode == 1 and "is not instrumented" in done.stderr
    assert "ran:" not in done.stdout


def test_what_is_missing_is_said(repo: Path) -> None:
    """``bash: ...: No such file`` instead of what to do."""
    (repo / ".venv/bin/python").unlink()
    done = run(repo)
    assert done.returncode == 1 and "scripts/test.sh makes it" in done.stderr
