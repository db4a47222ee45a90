"""The engine's import stays light: torch and transformers only, whatever run.py needs besides."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("hydra", "omegaconf", "wandb", "datasets", "lightning", "pytorch_lightning", "ray")
ENGINE_SIDE = (
    "engine",
    "executors",
    "features",
    "kernels",
    "kvcache",
    "models",
    "routers",
    "scheduler",
)

IMPORT_ALL = """
import importlib, pkgutil
for folder in {folders!r}:
    package = importlib.import_module("tokenrouter." + folder)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith(".triton"):
            importlib.import_module(module.name)
"""


def modules_after(code: str) -> set[str]:
    """Top-level modules loaded by a fresh interpreter after ``code``."""
    report = "\nimport json, sys\nprint(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", code + report],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import tokenrouter; from tokenrouter import LLM, SamplingParams",
        IMPORT_ALL.format(folders=ENGINE_SIDE),
    ],
    ids=["public names", "every module of the engine's side"],
)
def test_engine_import_is_light(code: str) -> None:
    """Guards against a convenience import that makes each user of the engine load Hydra or W&B."""
    loaded = modules_after(code)
    assert "torch" in loaded, "the probe must have imported the engine"
    assert not loaded & set(HEAVY)


def test_probe_sees_a_heavy_import() -> None:
    """Guards the guard: the heavy modules are installed here, so their absence above means much."""
    assert importlib.util.find_spec("hydra") is not None
    assert {"hydra", "omegaconf"} <= modules_after("import hydra")


def test_importing_the_package_does_no_work() -> None:
    """Guards against files written or threads started by a plain import."""
    code = (
        "import threading, tokenrouter\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
    )
    assert "tokenrouter" in modules_after(code)
