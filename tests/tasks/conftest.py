"""The main job, run once for this folder."""

from pathlib import Path

import pytest

from tests.tasks.jobs import run_in
from tokenrouter.tasks import compare
from tokenrouter.tasks.prepare import Setup


@pytest.fixture(scope="session")
def tradeoff_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The main job on a tiny model, logged to W&B offline, with decisions."""
    path = tmp_path_factory.mktemp("tradeoff")
    return run_in(path, "debug=tiny", "logger=wandb", "log_decisions=true")


@pytest.fixture
def setups(monkeypatch: pytest.MonkeyPatch) -> list[Setup]:
    """Fills with what each comparison built before it measured quality."""
    found: list[Setup] = []
    measure = compare.measure

    def keep(setup: Setup) -> object:
        found.append(setup)
        return measure(setup)

    monkeypatch.setattr(compare, "measure", keep)
    return found
