"""The router of trees: lightgbm's own scores, and a library that is there only when it is used."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import lightgbm
import pytest
import torch

from tests.routers.trained import drawn_artifact, see
from tokenrouter.routers import TreesRouter
from tokenrouter.routers.artifact import write_artifact

IDS = list(range(40))


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(write_artifact(drawn_artifact("trees"), tmp_path / "router"))


def test_the_score_is_the_librarys(path: str) -> None:
    """Guards against columns in another order than in training."""
    router = TreesRouter(path=path)
    inputs = see(router, IDS)
    booster = lightgbm.Booster(model_str=drawn_artifact("trees").text)
    expected = torch.from_numpy(booster.predict(inputs.values_TF.numpy())).float()
    assert torch.equal(router.score(inputs), expected) and len(expected.unique()) > 5


def test_trees_that_the_library_cannot_read_are_refused(tmp_path: Path) -> None:
    spoilt = replace(drawn_artifact("trees"), text="tree\nversion=v9\n")
    path = write_artifact(spoilt, tmp_path / "router")
    with pytest.raises(ValueError, match="lightgbm cannot read the trees of this router"):
        TreesRouter(path=str(path))


def test_without_the_library_it_says_what_to_install(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(ValueError, match=r"needs lightgbm .*tokenrouter\[trees\].*router=mlp"):
        TreesRouter(path=path)


def test_the_library_is_not_imported_by_the_package() -> None:
    """Guards against an import that makes every user install and load it."""
    code = "import sys, tokenrouter, tokenrouter.routers.trees; sys.exit('lightgbm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
