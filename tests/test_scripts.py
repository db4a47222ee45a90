"""The set-up scripts, run for real in a small copy of the tree with a stub interpreter.

The stub answers every question about Python truthfully, but its `-m venv` lays down copies of
itself and its `-m pip install` only writes its arguments to a file, so each test sees exactly what
the scripts would install, in which order, without installing anything.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), ROOT / ".ci/run"])

STUB = """#!/usr/bin/env bash
case "$*" in
"-m venv --clear "*)
    rm -rf "$4" && mkdir -p "$4/bin" && cp "$0" "$4/bin/python"
    [[ -n ${STUB_NO_ENSUREPIP:-} ]] && exit 1
    printf '#!/bin/sh\\necho "pip 25 from %s/lib/pip"\\n' "$4" >"$4/bin/pip"
    chmod +x "$4/bin/pip"
    echo "venv" >>"$STUB_LOG" ;;
"-m pip install "*)
    echo "${*:4}" >>"$STUB_LOG"
    if [[ -n ${STUB_KILL:-} && $* == *"$STUB_KILL"* ]]; then kill -9 $$; fi
    if [[ -n ${STUB_REFUSE:-} && $* =~ $STUB_REFUSE ]]; then echo "no such version"; exit 1; fi ;;
*"sys.version_info"*) echo "${STUB_VERSION:-3.12}" ;;
"-VV") echo "Python ${STUB_VERSION:-3.12}" ;;
"-V") echo "Python ${STUB_VERSION:-3.12}" ;;
*) echo "ran: $*" ;;
esac
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sandbox:
    """A copy of what the scripts need, and a PATH with the stub first."""

    repo: Path
    bin: Path

    def run(self, *args: str, script: str = "quickstart.sh", **env: str) -> "Result":
        """Runs one script and returns its output and the installs that it asked for."""
        log = self.bin.parent / "installs.txt"
        log.write_text("")
        base = {"PATH": f"{self.bin}:/usr/bin:/bin", "STUB_LOG": str(log), "HOME": str(self.bin)}
        done = subprocess.run(
            ["bash", str(self.repo / "scripts" / script), *args],
            env=base | env,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        return Result(
            code=done.returncode,
            text=done.stdout + done.stderr,
            installs=log.read_text().splitlines(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Exit code, everything printed, and one line per venv or pip call."""

    code: int
    text: str
    installs: list[str]


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    """No GPU, x86-64, Python 3.12, nothing installed; a space in the path, as people have."""
    repo, bin_dir = tmp_path / "my clone", tmp_path / "bin"
    bin_dir.mkdir()
    shutil.copytree(ROOT / "scripts", repo / "scripts")
    shutil.copytree(ROOT / "requirements", repo / "requirements")
    shutil.copy(ROOT / "pyproject.toml", repo)
    executable(bin_dir / "python3", STUB)
    executable(bin_dir / "nvidia-smi", "#!/bin/sh\nexit 9\n")
    executable(bin_dir / "uname", "#!/bin/sh\necho x86_64\n")
    return Sandbox(repo=repo, bin=bin_dir)


def pins(name: str) -> dict[str, Requirement]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_valid_bash(script: Path) -> None:
    """Guards against a script that fails on the line nobody ran."""
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert (script.name == "lib.sh") or os.access(script, os.X_OK)


def test_first_call_installs_in_order_and_runs_the_job(sandbox: Sandbox) -> None:
    """Guards the order: torch's CPU build before anything that would pull the CUDA build."""
    result = sandbox.run("router=all_high", "prompt=two words")
    assert result.code == 0, result.text
    kinds = ["venv", "torch==", "-r", "--no-deps -r", "--no-deps --no-build-isolation -e"]
    without_constraints = [line.split("runtime.txt ", 1)[-1] for line in result.installs]
    without_constraints[2] = without_constraints[2].removeprefix("--no-build-isolation ")
    assert len(result.installs) == len(kinds)
    for line, kind in zip(without_constraints, kinds, strict=True):
        assert line.startswith(kind), result.installs
    assert "+cpu" in result.installs[1]
    assert "ran: run.py router=all_high prompt=two words" in result.text


def test_second_call_installs_nothing(sandbox: Sandbox) -> None:
    """Guards against a stamp that never fits; also when PYTHON names the version in use."""
    assert sandbox.run("--setup-only").code == 0
    for env in ({}, {"PYTHON": str(sandbox.bin / "python3")}):
        second = sandbox.run("--setup-only", **env)
        assert (second.code, second.installs) == (0, [])
        assert "ran: run.py" not in second.text


def test_test_script_adds_only_the_test_tools(sandbox: Sandbox) -> None:
    """Guards against a second torch install by test.sh, and against checks that stop reporting."""
    sandbox.run("--setup-only")
    executable(sandbox.repo / ".venv/bin/lint-imports", "#!/bin/sh\nexit 3\n")
    result = sandbox.run("-k", "x", script="test.sh")
    assert [line.endswith("requirements/dev.txt") for line in result.installs] == [True]
    assert result.code == 3, "a failing stage must stop the script with its exit code"
    assert "-m ruff check" in result.text and "-m mypy" in result.text
    assert "-m pytest" not in result.text
    executable(sandbox.repo / ".venv/bin/lint-imports", "#!/bin/sh\nexit 0\n")
    again = sandbox.run("-k", "x", script="test.sh")
    assert again.installs == [] and "ran: -m pytest -q " in again.text and "-k x" in again.text


@pytest.mark.parametrize("victim", ["torch==", "requirements/runtime.txt ", "model.txt", "-e "])
def test_killed_install_is_repaired(sandbox: Sandbox, victim: str) -> None:
    """Guards against a stamp left by an install that never ended, and half-copied packages."""
    killed = sandbox.run("--setup-only", STUB_KILL=victim)
    assert killed.code != 0 and "setup.log" in killed.text
    repaired = sandbox.run("--setup-only")
    assert repaired.code == 0 and repaired.installs[0] == "venv" and len(repaired.installs) == 5
    assert sandbox.run("--setup-only").installs == []


@pytest.mark.parametrize("missing", ["bin/pip", "bin/python", "bin"])
def test_broken_venv_is_made_anew(sandbox: Sandbox, missing: str) -> None:
    """Guards the cases of a killed `python -m venv` and of a folder emptied by hand."""
    sandbox.run("--setup-only")
    path = sandbox.repo / ".venv" / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    (sandbox.repo / ".venv/.setup-runtime").unlink()
    repaired = sandbox.run("--setup-only")
    assert repaired.code == 0 and repaired.installs[0] == "venv" and len(repaired.installs) == 5


def test_changed_pins_are_installed_into_the_same_venv(sandbox: Sandbox) -> None:
    """Guards against stale packages after a pull."""
    sandbox.run("--setup-only")
    with (sandbox.repo / "requirements/runtime.txt").open("a") as file:
        file.write("six==1.17.0\n")
    updated = sandbox.run("--setup-only")
    assert updated.code == 0 and len(updated.installs) == 4 and "venv" not in updated.installs


def test_moved_clone_and_other_python_get_a_new_venv(sandbox: Sandbox) -> None:
    """Guards against scripts of a venv that still point to the clone's old place or version."""
    sandbox.run("--setup-only")
    moved = Sandbox(repo=sandbox.repo.rename(sandbox.repo.parent / "moved"), bin=sandbox.bin)
    assert moved.run("--setup-only").installs[0] == "venv"
    other = sandbox.bin / "python3.13"
    executable(other, STUB.replace(":-3.12", ":-3.13"))
    assert moved.run("--setup-only").installs == []
    assert moved.run("--setup-only", PYTHON=str(other)).installs[0] == "venv"


def test_cpu_build_is_sought_before_the_default_build(sandbox: Sandbox) -> None:
    """Guards against gigabytes of CUDA packages on a machine without a GPU."""
    result = sandbox.run("--setup-only", STUB_REFUSE=r"\+cpu", TORCH_CPU_INDEX="http://cpu.test/")
    assert result.code == 0, result.text
    own_index, cpu_index, default = result.installs[1:4]
    assert "+cpu" in own_index and "--extra-index-url" not in own_index
    assert "+cpu" in cpu_index and "--extra-index-url http://cpu.test/" in cpu_index
    assert "+cpu" not in default and "several GB" in result.text


@pytest.mark.parametrize("tool", ["nvidia-smi", "uname"])
def test_gpu_or_arm_takes_the_default_build(sandbox: Sandbox, tool: str) -> None:
    """Guards against a CPU build on a GPU machine, and "+cpu" asked where no such build exists."""
    executable(sandbox.bin / tool, "#!/bin/sh\necho aarch64\n")
    result = sandbox.run("--setup-only")
    assert result.code == 0 and not any("+cpu" in line for line in result.installs)


def test_unfit_python_is_refused_with_what_is_needed(sandbox: Sandbox) -> None:
    """Guards against a traceback out of pip; an unfit python3 does not end the search."""
    result = sandbox.run("--setup-only", PYTHON="python3", STUB_VERSION="3.10")
    assert result.code == 1 and result.installs == []
    assert "3.11, 3.12 or 3.13" in result.text and "3.10" in result.text
    missing = sandbox.run("--setup-only", PYTHON="/no/such/python")
    assert missing.code == 1 and "/no/such/python" in missing.text
    executable(sandbox.bin / "python3", STUB.replace(":-3.12", ":-3.9"))
    executable(sandbox.bin / "python3.11", STUB.replace(":-3.12", ":-3.11"))
    assert sandbox.run("--setup-only").code == 0


def test_python_without_venv_support_says_so(sandbox: Sandbox) -> None:
    """Guards the Debian case, where `python3 -m venv` lacks ensurepip."""
    result = sandbox.run("--setup-only", STUB_NO_ENSUREPIP="1")
    assert result.code == 1 and "python3-venv" in result.text and result.installs == []


def test_offline_runs_are_sent_once_and_those_of_unfinished_jobs_stay(sandbox: Sandbox) -> None:
    """Half a run on the server, marked as sent; runs that are sent again, or lost to one that asks for a key."""
    asks = "while read -r answer; do :; done"
    executable(
        sandbox.bin / "wandb",
        f'#!/bin/sh\n{asks}\ncase "$*" in *bad*) exit 1 ;; esac\necho "wandb $*"\n',
    )
    jobs = {"ok": "ok", "killed": "running", "sent": "ok", "plain": None}
    for job, status in jobs.items():
        run = sandbox.repo / "outputs" / job / "wandb" / f"offline-run-{job}"
        run.mkdir(parents=True)
        (run / f"run-{job}.wandb{'.synced' if job == 'sent' else ''}").touch()
        if status:
            (run.parents[1] / "status.json").write_text(json.dumps({"status": status}, indent=2))
    done = sandbox.run("--dry-run", script="sync_wandb.sh")
    assert done.code == 0 and "sent: 2, left out: 1, failed: 0" in done.text
    folder = sandbox.repo / "outputs"
    for job in ("ok", "plain"):
        assert f"wandb sync --yes --dry-run {folder}/{job}/wandb/offline-run-{job}\n" in done.text
    every = sandbox.run("--all", script="sync_wandb.sh")
    assert "sent: 3, left out: 0" in every.text and "offline-run-sent" not in every.text
    (folder / "ok").rename(folder / "bad")
    failed = sandbox.run(str(folder), script="sync_wandb.sh")
    assert failed.code == 1 and "sent: 1, left out: 1, failed: 1" in failed.text
    assert sandbox.run("/no/such", script="sync_wandb.sh").code == 2


def test_pins_fit_what_pyproject_declares() -> None:
    """Guards against a dependency that is declared and never pinned, or pinned out of its range."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for declared, names in (
        (project["dependencies"], ["runtime.txt"]),
        (project["optional-dependencies"]["dev"], ["runtime.txt", "dev.txt"]),
    ):
        pinned = {key: value for name in names for key, value in pins(name).items()}
        for requirement in map(Requirement, declared):
            version = next(iter(pinned[canonicalize_name(requirement.name)].specifier)).version
            assert version in requirement.specifier, (str(requirement), version)


def test_every_requirement_is_pinned_exactly() -> None:
    """Guards reproducibility: a range in the pins installs something else next month."""
    for name in ("runtime.txt", "dev.txt", "model.txt"):
        for requirement in pins(name).values():
            operators = [spec.operator for spec in requirement.specifier]
            assert operators == ["=="], (name, str(requirement))


def test_this_interpreter_is_supported() -> None:
    """Guards `requires-python` against drifting from what the scripts accept."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.14"
    assert (3, 11) <= sys.version_info[:2] < (3, 14)
