"""Guards notebooks/: cells that no longer run, or say something else than their text."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.test_report import made

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"


def run(name: str, **parameters: Any) -> dict[str, Any]:
    """A notebook's variables at its end, run as a script with other parameters."""
    return runpy.run_path(str(NOTEBOOKS / f"{name}.py"), init_globals={"SMALL": True} | parameters)


def test_quick_tour() -> None:
    """A low path that costs nothing, or a router that costs more than it."""
    kl_mnat = run("quick_tour")["kl_mnat"]
    assert kl_mnat["all_high"] == 0.0 < kl_mnat["rule"] < kl_mnat["all_low"]


def test_new_router() -> None:
    """A router that is shown and does not do what it says."""
    found = run("new_router")
    routes, ids = found["routes"], found["ids"]
    assert len(routes) == len(ids) and routes[-1] == -1
    seen: set[int] = set()
    for position, (token_id, route) in enumerate(zip(ids[:-1], routes[:-1], strict=True)):
        assert route == int(position >= 4 and token_id in seen), position
        seen.add(token_id)


def test_decision_log() -> None:
    found = run("decision_log")
    rows = found["counts"].to_pylist()
    assert sum(row["position_count"] for row in rows) == found["table"].num_rows > 60
    assert {row["executed"] for row in rows} == {"high", "low"}
    assert found["degraded"].num_rows == 0


def test_figure_from_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A figure without the points of some runs."""
    for seed in (0, 1):
        made(tmp_path / "runs" / str(seed), overrides=("router=rule", f"seed={seed}"))
    made(tmp_path / "runs" / "2", overrides=("router=mlp", "seed=0"))
    figure = tmp_path / "figure.png"
    found = run("figure_from_runs", RUNS=[str(tmp_path / "runs")], FIGURE=figure)
    assert figure.read_bytes().startswith(b"\x89PNG")
    names = [curve.name for curve in found["curves"]]
    assert names == [
        "1, 2: router=rule, all_high",
        "1, 2: router=rule, rule",
        "3: router=mlp, all_high",
        "3: router=mlp, rule",
    ]
    assert "95 % over runs" in capsys.readouterr().out


def test_figure_of_runs_that_compare_nothing(tmp_path: Path) -> None:
    """IndexError for runs of task=generate."""
    (made(tmp_path / "0") / "systems.json").unlink()
    with pytest.raises(ValueError, match="has both a rate and a KL: make some with task=tradeoff"):
        run("figure_from_runs", RUNS=[str(tmp_path)], FIGURE=tmp_path / "figure.png")


def test_all_are_run_and_named() -> None:
    """A notebook that nothing runs, or that nobody finds."""
    names = {path.stem for path in NOTEBOOKS.glob("*.py")}
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    readme = (ROOT / "README.md").read_text()
    assert names and names <= tested and all(f"{name}.py" in readme for name in names)
