"""Guards what a report says of retention: a run that evicts nothing must not look like one that does."""

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.tools import greedy, prompts, tiny
from tokenrouter import LLM, EngineOptions
from tokenrouter.evaluation.memory_notes import memory_notes
from tokenrouter.evaluation.throughput import run_requests
from tokenrouter.kvcache import compaction
from tokenrouter.kvcache.retention import (
    Full,
    HeavyHitter,
    RetentionOptions,
    RetentionPolicy,
    SinkWindow,
    Threshold,
)
from tokenrouter.workloads import RequestSpec


def short(policy: RetentionPolicy, **options: Any) -> RetentionOptions:
    """Of a policy that is asked early."""
    window = 4 if "attention" in policy.needs else 32
    made = RetentionOptions(policy=policy, interval=8, window=window, sinks=2, recent=3)
    return replace(made, **options)


ONE_LONG = [tuple(range(5, 133))]


def notes(policy: RetentionPolicy, *, given: Any = None, **options: Any) -> str:
    """Of a pass over some requests."""
    retention = short(policy, **options)
    llm = LLM(tiny(), options=EngineOptions(retention=retention))
    requests = [
        RequestSpec(prompt_ids=p, params=greedy(2 if given else 8)) for p in given or prompts()[:8]
    ]
    served = run_requests(llm, requests)
    return " ".join(memory_notes(retention, [served.stats]))


@pytest.mark.parametrize(
    ("policy", "options", "expected"),
    [
        (HeavyHitter(), {"interval": 500}, "no request came to its first decision, at 500 tokens"),
        (HeavyHitter(evicted_frac=0.0), {}, "its budget keeps every entry"),
        (Threshold(threshold=1e-6), {}, "received more than the threshold"),
        (SinkWindow(), {"recent": 300}, "not below the 302 entries that always stay"),
        (SinkWindow(), {}, r"evicted \d+ entries a pass; the KV peak is \d+% below"),
        (Full(), {}, "full keeps every entry. Choose another policy"),
        (
            Full(),
            {"compress": "old"},
            r"evicted 0 entries a pass and kept up to \d+ in int8 at once",
        ),
    ],
)
def test_what_is_said(policy: RetentionPolicy, options: dict[str, Any], expected: str) -> None:
    """ "Retention on" beside numbers of a run in which it did nothing."""
    assert re.search(expected, notes(policy, **options))


def test_evictions_that_free_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the entries gone and the process as large as before."""
    assert "No memory went back to the system" in notes(SinkWindow())
    monkeypatch.setattr(compaction, "MIN_SLOTS", 10)
    monkeypatch.setattr(compaction, "PATIENCE_STEPS", 0)
    assert "No memory" not in notes(SinkWindow(evicted_frac=0.9))


def test_a_peak_that_comes_before_the_entries_go() -> None:
    """0 % saved beside hundreds of evictions, and no word on why."""
    late = notes(SinkWindow(), interval=128, given=ONE_LONG)
    assert "it comes before the entries go. Lower" in late and "evicted 64 entries" in late
    assert "it comes before" not in notes(SinkWindow())


def generate(llm: LLM, given: Any) -> None:
    llm.generate(given, greedy(2))


def stream(llm: LLM, given: Any) -> None:
    list(llm.stream(given, greedy(2)))


@pytest.mark.parametrize("call", [generate, stream])
@pytest.mark.parametrize(
    ("retention", "level", "said"),
    [
        (short(HeavyHitter(), interval=500), "WARNING", "came to its first decision, at 500 to"),
        (short(HeavyHitter(evicted_frac=0.0)), "WARNING", r"asked \d+ times .* its budget keeps"),
        (short(SinkWindow(), interval=128), "WARNING", r"evicted \d+ entries\. The KV peak is not"),
        (short(SinkWindow()), "INFO", "No memory went back to the system"),
        (None, "", ""),
    ],
)
def test_a_library_hears_it_once(
    caplog: pytest.LogCaptureFixture,
    call: Callable[[LLM, Any], None],
    retention: RetentionOptions | None,
    level: str,
    said: str,
) -> None:
    """Outputs of a policy that never acted, taken for what eviction costs; or the same words after every call."""
    llm = LLM(tiny(), options=EngineOptions(retention=retention))
    with caplog.at_level(logging.INFO, logger="tokenrouter.engine.retention_notes"):
        for _ in range(3):
            call(llm, ONE_LONG)
    records = [r for r in caplog.records if r.name == "tokenrouter.engine.retention_notes"]
    assert [r.levelname for r in records] == ([level] if level else [])
    assert all(re.search(said, record.getMessage()) for record in records)
