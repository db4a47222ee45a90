"""The main job, run once for this folder, and a browser where there is one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tasks.browser import Page, browser_page, chromium
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


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    binary = chromium()
    if binary is None:
        pytest.skip("no Chromium on this machine: the page is not looked at in a browser")
    with browser_page(binary, tmp_path / "profile") as found:
        yield found
