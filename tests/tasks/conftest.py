"""The main job, run once for this folder."""

from pathlib import Path

import pytest

from tests.tasks.jobs import run_in


@pytest.fixture(scope="session")
def tradeoff_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The main job on a tiny model, logged to W&B offline, with decisions."""
    path = tmp_path_factory.mktemp("tradeoff")
    return run_in(path, "debug=tiny", "logger=wandb", "log_decisions=true")
