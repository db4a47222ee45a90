"""Guards the virtual clock: idle time that is waited for or counted as work, late arrivals, an endless loop."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.evaluation import clock
from tokenrouter.evaluation.clock import VirtualClock
from tokenrouter.evaluation.throughput import Repeat, Throughput, run_requests
from tokenrouter.models import LoadedModel
from tokenrouter.workloads import RequestSpec


class FakeTime:
    """A real engine on a clock of one second per step that stands still between steps."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.added: list[tuple[str, float, float]] = []
        self._step, self._add = llm.engine.step, llm.engine.add_request
        monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: self.now_s))
        monkeypatch.setattr(llm.engine, "step", self.step)
        monkeypatch.setattr(llm.engine, "add_request", self.add)

    def step(self) -> Any:
        self.now_s += 1.0
        return self._step()

    def add(self, request_id: str, *arguments: Any, arrival_s: float, **options: Any) -> None:
        self.added.append((request_id, self.now_s - 1000.0, arrival_s - 1000.0))
        self._add(request_id, *arguments, arrival_s=arrival_s, **options)


def _request(arrival_s: float, output: int) -> RequestSpec:
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    return RequestSpec(prompt_ids=(5, 6, 7), params=params, arrival_s=arrival_s)


def _run(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, *requests: RequestSpec
) -> tuple[Repeat, FakeTime]:
    llm = LLM(model)
    time = FakeTime(llm, monkeypatch)
    return run_requests(llm, requests), time


def test_idle_time_is_skipped_and_work_is_not(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass slept through every gap of its trace, and its rates were those of the arrivals."""
    result, time = _run(model, monkeypatch, _request(0, 3), _request(100, 2), _request(500, 1))
    assert (result.wall_s, result.idle_s, result.makespan_s) == (6.0, 495.0, 501.0)
    assert time.now_s == 1006.0
    assert [step["end_ms"] for step in result.steps] == [1e3, 2e3, 3e3, 101e3, 102e3, 501e3]
    served = Throughput(repeats=(result,))
    assert served.output_tok_s.median == served.requests_s.median * 2 == 1.0
    assert (served.busy_s.median, served.makespan_s.median) == (6.0, 501.0)


def test_a_request_that_arrives_during_a_step_joins_after_it_and_counts_from_its_arrival(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time to first token left out the rest of the step in which it came."""
    result, time = _run(model, monkeypatch, _request(0, 3), _request(1.5, 2), _request(2, 1))
    assert time.added == [("0", 0.0, 0.0), ("1", 2.0, 1.5), ("2", 2.0, 2.0)]
    assert [metrics.arrival_s for metrics, _ in result.requests] == [1000.0, 1001.5, 1002.0]
    assert (result.wall_s, result.idle_s) == (4.0, 0.0)


def test_after_a_jump_arrivals_are_on_the_real_clock(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request counted from an arrival minutes ahead of the clock that its tokens are timed on."""
    _, time = _run(model, monkeypatch, _request(7, 2), _request(60, 1), _request(60.5, 1))
    assert time.added == [("0", 0.0, 0.0), ("1", 2.0, 2.0), ("2", 3.0, 2.5)]


def test_outputs_keep_the_order_of_the_requests(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that are listed in another order than they arrive in."""
    result, time = _run(model, monkeypatch, _request(9, 1), _request(0, 2), _request(3, 3))
    assert [request_id for request_id, *_ in time.added] == ["1", "2", "0"]
    assert [num_output for _, num_output in result.requests] == [1, 2, 3]
    assert result.makespan_s == 10.0


def test_requests_wait_outside_a_full_queue(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine refused the third of three requests at once, and the pass ended with an error."""
    llm = LLM(model, options=EngineOptions(max_num_waiting=2, max_num_seqs=1))
    time = FakeTime(llm, monkeypatch)
    result = run_requests(llm, [_request(0, 2) for _ in range(5)])
    assert [num_output for _, num_output in result.requests] == [2] * 5
    assert result.stats.num_rejected == 0 and time.added[2][1] > 0.0
    assert {arrival_s for _, _, arrival_s in time.added} == {0.0}


@pytest.mark.parametrize(("scheduler", "order"), [("priority", [0, 2, 1]), ("fcfs", [0, 1, 2])])
def test_priorities_reach_the_scheduler_that_heeds_them(
    model: LoadedModel, scheduler: str, order: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """scheduler=priority that serves as fcfs whatever is asked; a baseline that warns of what it ignores by design."""
    llm = LLM(model, options=EngineOptions(scheduler=scheduler, max_num_seqs=1))
    requests = [
        replace(_request(1e-9 * index, 1), priority=priority)
        for index, priority in enumerate((0, 2, 1))
    ]
    first_token_s = [metrics.first_token_s for metrics, _ in run_requests(llm, requests).requests]
    assert sorted(range(3), key=lambda index: first_token_s[index]) == order
    assert not caplog.records


def test_time_before_the_first_arrival_is_no_part_of_a_pass(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, _ = _run(model, monkeypatch, _request(40, 2))
    assert (result.wall_s, result.idle_s) == (2.0, 0.0)


def test_a_jump_reaches_the_arrival_whatever_rounding_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of elapsed and skipped time fell one bit short of the arrival: no request, and no end."""
    draw = random.Random(0)
    now = draw.uniform(1e3, 1e6)
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now))
    virtual, arrival = VirtualClock(), 0.0
    for _ in range(2000):
        now += draw.expovariate(1.0)
        arrival = max(arrival, virtual.now_s()) + draw.expovariate(0.1)
        virtual.skip_to(arrival)
        assert virtual.now_s() >= arrival
        assert virtual.real_s(arrival) == pytest.approx(now, abs=1e-6)


def test_jumping_back_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now))
    virtual = VirtualClock()
    now = 15.0
    virtual.skip_to(3.0)
    assert (virtual.skipped_s, virtual.now_s()) == (0.0, 5.0)
