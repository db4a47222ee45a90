"""Guards what an engine says of a retention policy that does nothing, or from which nothing comes."""

import logging

import pytest

from tests.engine.tools import greedy, tiny
from tokenrouter import LLM, EngineOptions
from tokenrouter.kvcache.retention import Full, RetentionOptions, SinkWindow

PROMPT = [3 + i % 200 for i in range(150)]


def engine(policy: Full | SinkWindow, **options: object) -> LLM:
    retention = RetentionOptions(policy=policy, interval=64, sinks=1, recent=4)
    return LLM(tiny(), options=EngineOptions(retention=retention, **options))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_int8_entries_do_not_hide_a_peak_that_stays(
    caplog: pytest.LogCaptureFixture, dtype: str
) -> None:
    """A saving that int8 alone makes was taken for the policy's."""
    llm = engine(SinkWindow(evicted_frac=0.5), kv_cache_dtype=dtype)
    llm.generate([PROMPT[:64]], greedy(2))
    assert llm.engine.stats.evicted_entries > 0
    assert any("KV peak is not lower" in text for text in said(caplog))


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_a_policy_that_is_asked_and_keeps_all_is_idle(
    caplog: pytest.LogCaptureFixture, dtype: str
) -> None:
    """Entries that are int8 from the start counted as something that the policy had done."""
    engine(Full(), kv_cache_dtype=dtype).generate([PROMPT], greedy(2))
    assert any("evicted nothing: full keeps every entry" in text for text in said(caplog))


def test_each_reason_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A warm-up too short for a decision silenced what the real requests had to say."""
    llm = engine(Full())
    llm.generate([PROMPT[:5]], greedy(1))
    assert [("first decision" in text) for text in said(caplog)] == [True]
    for _ in range(2):
        llm.generate([PROMPT], greedy(1))
    assert [("keeps every entry" in text) for text in said(caplog)] == [False, True]


def test_decisions_that_came_with_a_prefix_count(caplog: pytest.LogCaptureFixture) -> None:
    """A request that inherits evicted entries was said to have come to no decision."""
    policy = SinkWindow(evicted_frac=0.5)
    llm = engine(policy, prefix_sharing=True, prefix_block=64)
    llm.generate([PROMPT[:129]], greedy(1))
    llm.engine.stats.reset()
    caplog.clear()
    llm.generate([PROMPT[:129]], greedy(1))
    assert llm.engine.stats.shared_tokens >= 64
    assert not [text for text in said(caplog) if "first decision" in text]
