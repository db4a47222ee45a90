"""Guards where a step's time is booked."""

import time
from typing import Any

import pytest

from tests.engine.tools import greedy, plain_llm, prompts
from tokenrouter import EngineOptions
from tokenrouter.engine.retainer import Retainer
from tokenrouter.kvcache.retention import RetentionOptions, SinkWindow


def test_eviction_is_not_the_samplers_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The price of retention shown as that of sampling."""
    retire = Retainer.retire

    def slow(self: Retainer) -> Any:
        time.sleep(0.05)
        return retire(self)

    monkeypatch.setattr(Retainer, "retire", slow)
    llm = plain_llm(EngineOptions(retention=RetentionOptions(policy=SinkWindow(), interval=32)))
    llm.generate([prompts()[2]], greedy(4))
    stats = llm.engine.stats
    assert stats.memory_s > 0.05 * stats.steps > stats.sampler_s
    parts = stats.schedule_s + stats.router_s + stats.executor_s + stats.sampler_s + stats.memory_s
    assert 0.5 * stats.step_s < parts <= stats.step_s
