"""Guards what a report says of retention: a run that evicts nothing must not look like one that does."""

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.tools import greedy, prompts, tiny
from tokenrouter import LLM, EngineOptions
from tokenrouter.evaluation.memory_notes import memory_notes
from tokenrouter.evaluation.throughput import Throughput, run_requests
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


def notes(policy: RetentionPolicy, **options: Any) -> str:
    """Of a pass over some requests."""
    retention = replace(
        RetentionOptions(policy=policy, interval=8, window=4, sinks=2, recent=3), **options
    )
    llm = LLM(tiny(), options=EngineOptions(retention=retention))
    requests = [RequestSpec(prompt_ids=p, params=greedy(8)) for p in prompts()[:8]]
    served = Throughput(repeats=(run_requests(llm, requests),))
    return " ".join(memory_notes(retention, served))


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
