"""Guards ``router=request_level`` as the chosen router where no baseline has its engine."""

import json
import re
from pathlib import Path

import pytest

from tests.tasks.jobs import run_in

EVICTS = ("kvcache=sink_window", "kvcache.retention.interval=16", "kvcache.retention.recent=4")
RUN = ("debug=tiny", "router=request_level")


@pytest.mark.parametrize("task", ["evaluate", "tradeoff"])
def test_with_retention_its_quality_is_that_of_both_sides_with_it(
    tmp_path: Path, task: str
) -> None:
    """KeyError: 'request_level+sink_window'."""
    path = run_in(tmp_path, *RUN, f"task={task}", "router.high_frac=0.4", *EVICTS)
    rows = {r["name"]: r for r in json.loads((path / "systems.json").read_text())["rows"]}
    chosen = rows["request_level+sink_window"]
    assert chosen["chosen"] and chosen["kl_mean_nats"] > rows["request_level"]["kl_mean_nats"] > 0
    assert chosen["eval_high_frac"] == pytest.approx(0.4)
    notes = (path / "table.md").read_text()
    for side in ("all_high", "all_low"):
        assert f"in the windows of text ({side}'s side), evicted" in notes
        assert f"in forced decode of them ({side}'s side), evicted" in notes


def test_of_two_engines_each_has_its_own_note(tmp_path: Path) -> None:
    """The mean of one that evicts and of one that does not, said of both."""
    by_class = (
        "kvcache=route",
        "kvcache.retention.policy.classes={high: protect, low: drop_first}",
    )
    path = run_in(tmp_path, *RUN, "task=evaluate", "router.high_frac=0.4", *by_class, *EVICTS[1:])
    notes = (path / "table.md").read_text()
    assert re.search(r"\(all_high's side\), was asked \d+ times and evicted nothing", notes)
    assert re.search(r"\(all_low's side\), evicted [1-9]", notes)


@pytest.mark.parametrize("high_frac", [0.0, 1.0])
def test_at_either_end_it_is_that_side_with_retention(tmp_path: Path, high_frac: float) -> None:
    """Mixed from baselines, which keep every entry."""
    side = "all_high" if high_frac else "all_low"
    found = []
    for name, router in (("mixed", "request_level"), ("side", side)):
        options = (f"router.high_frac={high_frac}",) if router == "request_level" else ()
        path = run_in(
            tmp_path / name, "debug=tiny", "task=evaluate", f"router={router}", *options, *EVICTS
        )
        found.append(json.loads((path / "metrics.json").read_text())["quality"]["kl_mean_nats"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_without_a_low_path_it_is_scored_as_it_runs(tmp_path: Path) -> None:
    """KeyError: 'request_level'."""
    with pytest.warns(UserWarning, match="asks for route 'low'"):
        path = run_in(tmp_path, *RUN, "router.high_frac=0.4", "executor=full", "task=evaluate")
    quality = json.loads((path / "metrics.json").read_text())["quality"]
    assert quality["kl_mean_nats"] == pytest.approx(quality["kl_high_mean_nats"], rel=1e-6)
