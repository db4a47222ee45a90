"""Guards against configs of conf/data that do not fit the local sets, and sides of a text that overlap."""

import json
import os
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tests.tasks.jobs import ROOT, compose_config, run_in
from tokenrouter.tasks.prepare import Setup
from tokenrouter.workloads import LocalText, calibration_documents, evaluation_documents

LOCAL = sorted(
    path.stem
    for path in (ROOT / "conf" / "data").glob("*.yaml")
    if "data_dir" in OmegaConf.load(path)
)
TINY = ("debug=tiny", "evaluation.num_windows=1", "evaluation.decode_windows=1")


@pytest.fixture(scope="module")
def data_dir() -> Path:
    """The folder of local data sets."""
    folder = os.environ.get("TOKENROUTER_DATA_DIR")
    if not folder:
        pytest.skip("TOKENROUTER_DATA_DIR is not set: no folder of local data sets")
    return Path(folder)


def _source(name: str, data_dir: Path) -> LocalText:
    cfg = compose_config(f"data={name}", f"paths.data_dir={data_dir}")
    source: LocalText = instantiate(cfg.data)
    return source


@pytest.mark.data
@pytest.mark.parametrize("name", LOCAL)
def test_a_local_set_loads_through_its_config(name: str, data_dir: Path) -> None:
    """A pattern that misses the set's files, or one that takes a whole set for one document."""
    documents = _source(name, data_dir).documents()
    assert len(documents) >= 20 and all(document.strip() for document in documents)
    sides = calibration_documents(documents), evaluation_documents(documents)
    assert not set(sides[0]) & set(sides[1])
    assert all(sum(map(len, side)) > 100_000 for side in sides)


@pytest.mark.data
def test_an_article_of_wikitext_starts_with_its_title(data_dir: Path) -> None:
    first = [
        document.strip().split("\n")[0] for document in _source("wikitext2", data_dir).documents()
    ]
    assert len(first) == 60
    assert all(line.startswith("= ") and not line.startswith("= =") for line in first)


@pytest.mark.data
@pytest.mark.parametrize("name", LOCAL)
def test_a_local_set_is_evaluated(name: str, data_dir: Path, tmp_path: Path) -> None:
    path = run_in(tmp_path, *TINY, "task=evaluate", f"data={name}", f"paths.data_dir={data_dir}")
    quality = json.loads((path / "metrics.json").read_text())["quality"]
    assert 0.0 <= quality["kl_high_mean_nats"] < quality["kl_mean_nats"]
    provenance = json.loads((path / "provenance.json").read_text())
    assert provenance["extra"]["text"] == name
    assert f"tokens of {name}" in (path / "table.md").read_text()


def test_a_comparison_evaluates_and_calibrates_on_different_documents(
    tmp_path: Path, setups: list[Setup]
) -> None:
    """Thresholds were set on random passages of the very text that was evaluated."""
    run_in(tmp_path, *TINY, "task=evaluate", "router.budget.high_frac=0.2")
    [setup] = setups
    evaluated = _pieces([setup.text.ids])
    assert len(evaluated) > 10_000 and evaluated >= _pieces(setup.windows)
    assert not evaluated & _pieces(setup.builder.calibration_ids)


def _pieces(sequences: list[list[int]], length: int = 400) -> set[tuple[int, ...]]:
    """Every run of ``length`` tokens: longer than any phrase that two documents share by chance."""
    return {tuple(ids[i : i + length]) for ids in sequences for i in range(len(ids) - length + 1)}
