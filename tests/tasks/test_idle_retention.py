"""Guards what each task says of a retention policy that does nothing: its numbers are those of no policy at all."""

import json
import logging
import re
from pathlib import Path

import pytest

from tests.tasks.jobs import run_in
from tokenrouter.kvcache.retention import RetentionOptions, SinkWindow
from tokenrouter.tasks.checks import check_windows

IDLE = "evicted nothing: no request came to its first decision, at 1024 tokens"
NEVER = ("debug=tiny", "router=all_high", "kvcache=sink_window", "kvcache.retention.interval=1024")
EVICTS = (
    "debug=tiny",
    "router=all_high",
    "kvcache=sink_window",
    "kvcache.retention.interval=16",
    "kvcache.retention.recent=4",
)


def _notes(path: Path) -> list[str]:
    found: list[str] = json.loads((path / "systems.json").read_text())["notes"]
    return [note for note in found if note.startswith(("Retention", "No memory"))]


def test_quality_and_throughput_each_say_it(tmp_path: Path) -> None:
    """Only the requests and forced prefill were looked at: the KL stood beside a policy that never acted there."""
    assert _notes(run_in(tmp_path / "none", *NEVER)) == [
        f"Retention sink_window, {place}, {IDLE}. Lower kvcache.retention.interval, or serve longer requests."
        for place in ("in the requests", "in the windows of text", "in forced decode of them")
    ]
    first, saved, second, third = _notes(run_in(tmp_path / "some", *EVICTS))
    assert first.startswith("Retention sink_window, in the requests, evicted ")
    assert saved.startswith("No memory went back to the system")
    assert second.startswith("Retention sink_window, in the windows of text, evicted ")
    assert "entries a window; the KV peak is" in second
    assert re.search(r"in forced decode of them, evicted \d+ entries a batch of windows;", third)


@pytest.mark.parametrize("task", ["evaluate", "benchmark"])
def test_a_task_that_measures_one_of_them_says_it_of_that(tmp_path: Path, task: str) -> None:
    """``task=evaluate`` said nothing."""
    places = {"evaluate": ("the windows of text", "forced decode of them")}.get(
        task, ("the requests",)
    )
    notes = _notes(run_in(tmp_path, *NEVER, f"task={task}"))
    for place, note in zip(places, notes, strict=True):
        assert f"in {place}, {IDLE}" in note


def test_a_bisection_says_it(tmp_path: Path) -> None:
    """Memory that changes no output because nothing was evicted."""
    path = run_in(tmp_path, *NEVER, "task=bisect")
    assert f"Retention sink_window, with everything on, {IDLE}" in (path / "bisect.md").read_text()
    assert IDLE in str(json.loads((path / "bisect.json").read_text())["notes"])


def test_a_completion_says_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A text that is the one without retention, under the name of a policy."""
    with caplog.at_level(logging.WARNING):
        run_in(tmp_path, *NEVER, "task=generate", "prompt=hi")
    assert [r for r in caplog.records if IDLE in r.getMessage()]


def test_a_pool_that_holds_a_window_with_eviction_is_enough(tmp_path: Path) -> None:
    """A window of 128 tokens refused in a pool of 100 slots, of which it holds at most 90."""
    few = ("evaluation.num_windows=1", "evaluation.decode_windows=1", "task=evaluate")
    path = run_in(tmp_path, *EVICTS, *few, "kvcache.num_slots=100")
    assert json.loads((path / "status.json").read_text())["status"] == "ok"


def test_windows_are_counted_in_slots() -> None:
    """Tokens, where the policy bounds the entries."""
    policy = SinkWindow(evicted_frac=0.0, max_entries=20)
    retention = RetentionOptions(policy=policy, interval=16, sinks=2, recent=3)
    needed = retention.max_live(1000)
    assert needed == 20 + 2 + 3 + 16
    check_windows(1000, 4096, needed, retention.max_live)
    with pytest.raises(ValueError, match=f"1000 tokens needs {needed} KV slots, .* has 40: lower"):
        check_windows(1000, 4096, 40, retention.max_live)
