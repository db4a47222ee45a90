"""Guards the limits: bad ones are refused by name, by the engine's options, too."""

import re
from typing import Any

import pytest

from tokenrouter import EngineOptions
from tokenrouter.kvcache.retention import Full, HeavyHitter, RetentionOptions
from tokenrouter.scheduler import SchedulerLimits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        (
            {"max_num_batched_tokens": 7},
            "max_num_batched_tokens 7 must be at least max_num_seqs 8: every running request",
        ),
        (
            {"phase_order": "decode"},
            "unknown phase_order 'decode'; choose one of: mixed, prefill_first, decode_first",
        ),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens must be at least 1, got 0"),
        (
            {"max_prefill_tokens": 33},
            "max_prefill_tokens 33 must be at most max_num_batched_tokens 32.*leave it null",
        ),
        ({"max_decode_tokens": 0}, "max_decode_tokens must be at least 1, got 0"),
        (
            {"max_decode_tokens": 9},
            "max_decode_tokens 9 must be at most max_num_seqs 8.*leave it null",
        ),
        ({"max_phase_wait_steps": -1}, "max_phase_wait_steps must be at least 0, got -1"),
        ({"max_overtaken": -1}, "max_overtaken must be at least 0, got -1"),
        ({"max_num_waiting": 0}, "max_num_waiting must be at least 1, got 0"),
    ],
)
@pytest.mark.parametrize("made", [SchedulerLimits, EngineOptions])
def test_bad_limits_are_refused(made: Any, options: dict[str, Any], message: str) -> None:
    """Decode tokens that never fit a step; an option that does nothing; a mistake that shows as a hang."""
    with pytest.raises(ValueError, match=message):
        made(**{"max_num_seqs": 8, "max_num_batched_tokens": 32, **options})


def test_the_edges_are_allowed() -> None:
    """A comparison off by one."""
    limits = SchedulerLimits(
        max_num_seqs=8,
        max_num_batched_tokens=8,
        max_prefill_tokens=8,
        max_decode_tokens=8,
        max_phase_wait_steps=0,
        max_overtaken=0,
        max_num_waiting=1,
    )
    assert limits.max_decode_tokens == limits.max_num_seqs == 8


def test_every_option_reaches_the_scheduler() -> None:
    """An option that is checked and then forgotten."""
    given = {
        "max_num_seqs": 6,
        "max_num_batched_tokens": 40,
        "max_prefill_tokens": 20,
        "max_decode_tokens": 5,
        "phase_order": "decode_first",
        "max_phase_wait_steps": 3,
        "max_overtaken": 7,
        "max_num_waiting": 9,
    }
    assert EngineOptions(**given).limits == SchedulerLimits(**given)
    assert set(given) == set(SchedulerLimits.__dataclass_fields__)


@pytest.mark.parametrize("value", [2.5, 8.0, float("nan"), float("inf"), True, "8"])
@pytest.mark.parametrize("name", ["num_host_slots", "max_num_seqs", "min_batch"])
def test_a_count_is_an_integer(name: str, value: object) -> None:
    """Half a slot, which is found out as a TypeError in the middle of a run."""
    message = rf"^{name} must be an integer of at least [01], got {re.escape(repr(value))}$"
    with pytest.raises(ValueError, match=message):
        EngineOptions(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, 1.0, float("nan"), True, "1"])
def test_a_refused_count_reads_the_same_wherever_it_stands(value: Any) -> None:
    """Two wordings of one rule: the scheduler's did not say what is allowed, the retention's was another."""
    said = []
    for make in (
        lambda: SchedulerLimits(max_num_seqs=value, max_num_batched_tokens=8),
        lambda: RetentionOptions(policy=Full(), interval=value),
        lambda: HeavyHitter(max_entries=value),
    ):
        with pytest.raises(ValueError) as refused:
            make()
        said.append(str(refused.value).split(maxsplit=1)[1])
    assert said == [said[0]] * 3 and "at least 1, got " in said[0]
