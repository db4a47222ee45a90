"""Guards goodput: limits of the wrong length, one limit alone, requests of one token, another clock."""

from dataclasses import replace

import pytest

from tokenrouter import LLM, SamplingParams
from tokenrouter.evaluation import slo as slo_module
from tokenrouter.evaluation.slo import (
    SLO,
    SLOOptions,
    Unloaded,
    measure_slo,
    measure_unloaded,
    probe_lengths,
)
from tokenrouter.evaluation.throughput import Repeat, Throughput, run_requests
from tokenrouter.models import LoadedModel
from tokenrouter.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tokenrouter.workloads import RequestSpec

CURVE = (Unloaded(10, 100.0, 10.0), Unloaded(30, 200.0, 20.0))
RELATIVE = SLO(options=SLOOptions(), unloaded=CURVE)
FIXED = SLO(options=SLOOptions(ttft_ms=500.0, tpot_ms=30.0))


def _request(num: int) -> RequestSpec:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    return RequestSpec(prompt_ids=tuple(3 + (7 * i + num) % 250 for i in range(num)), params=params)


def _times(ttft_ms: float, tpot_ms: float, num_output: int) -> RequestMetrics:
    first = 5.0 + ttft_ms / 1e3
    last = first + tpot_ms * (num_output - 1) / 1e3
    return RequestMetrics(
        arrival_s=5.0,
        first_scheduled_s=5.0,
        first_token_s=first,
        finished_s=last,
        queue_s=0.0,
        token_times_s=(first, last)[: min(num_output, 2)],
        num_preemptions=0,
    )


def _output(num_prompt: int, num_output: int, times: RequestMetrics) -> RequestOutput:
    completion = CompletionOutput(
        index=0, text="", delta="", token_ids=(7,) * num_output, metrics=times
    )
    return RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=(1,) * num_prompt,
        outputs=(completion,),
        finished=True,
    )


def test_limits_follow_the_prompt_length() -> None:
    """One limit for all lengths: every long prompt would miss it, or every short one meet it."""
    assert RELATIVE.limits(10) == (400.0, 20.0)
    assert RELATIVE.limits(20) == pytest.approx((600.0, 30.0))
    assert RELATIVE.limits(30) == (800.0, 40.0)
    assert RELATIVE.limits(1) == (400.0, 20.0) and RELATIVE.limits(90) == (800.0, 40.0)


def test_fixed_limits_win_one_by_one() -> None:
    options = SLOOptions(ttft_ms=123.0)
    assert SLO(options=options, unloaded=CURVE).limits(30) == (123.0, 40.0)
    assert FIXED.limits(10_000) == (500.0, 30.0)


@pytest.mark.parametrize(
    ("ttft_ms", "tpot_ms", "num_output", "is_met"),
    [
        (499.0, 29.0, 5, True),
        (501.0, 1.0, 5, False),
        (1.0, 31.0, 5, False),
        (499.0, 0.0, 1, True),
        (501.0, 0.0, 1, False),
    ],
)
def test_a_request_must_meet_both_limits(
    ttft_ms: float, tpot_ms: float, num_output: int, is_met: bool
) -> None:
    times = _times(ttft_ms, tpot_ms, num_output)
    assert FIXED.is_met(times, prompt_tokens=10, output_tokens=num_output) is is_met


def test_goodput_counts_requests_over_passes_and_per_second_of_makespan(model: LoadedModel) -> None:
    """Busy time would let a system serve more requests per second than arrive."""
    base = run_requests(LLM(model), [_request(4)])
    good, late, slow = (
        _output(20, 5, _times(*times, 5)) for times in ((590, 29), (610, 1), (1, 31))
    )

    def one(*outputs: RequestOutput, wall_s: float, idle_s: float) -> Repeat:
        return replace(base, outputs=outputs, wall_s=wall_s, idle_s=idle_s)

    passes = (
        one(good, late, slow, good, wall_s=2.0, idle_s=2.0),  # 2 good in 4 s
        one(good, late, slow, slow, wall_s=1.0, idle_s=9.0),  # 1 in 10 s
        one(good, good, good, late, wall_s=3.0, idle_s=0.0),  # 3 in 3 s
    )
    goodput = RELATIVE.goodput(Throughput(repeats=passes))
    assert goodput.frac == 6 / 12 and goodput.requests_s == 0.5


def test_unloaded_times_cover_the_prompts_and_are_of_one_request_at_a_time(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probes that run together, begin alike (a prefix cache would answer them), or leave a length out."""
    llm, probes, run = LLM(model), [], run_requests

    def record(llm: LLM, requests: list[RequestSpec]) -> Repeat:
        [request] = requests
        probes.append(request.prompt_ids)
        assert not llm.engine.has_unfinished()
        return run(llm, requests)

    monkeypatch.setattr(slo_module, "run_requests", record)
    points = measure_unloaded(llm, [_request(n) for n in (90, 4, 30)])
    lengths = [point.prompt_tokens for point in points]
    assert lengths == probe_lengths([90, 4, 30], 4000) and (lengths[0], lengths[-1]) == (4, 90)
    assert [len(ids) for ids in probes] == [n for n in lengths for _ in range(3)]
    assert len({ids[:4] for ids in probes}) == len(probes)
    assert all(point.ttft_ms > 0.0 and point.tpot_ms > 0.0 for point in points)


def test_probes_fit_the_engine() -> None:
    """A prompt as long as the model leaves no room for the tokens that its TPOT is measured on."""
    assert probe_lengths([4000, 100], 500)[-1] == 500
    assert probe_lengths([4000, 900], 500) == [500]
    assert probe_lengths([7, 7, 7], 500) == [7]
    assert probe_lengths([1, 10_000], 10_000) == [1, 10, 100, 1000, 10_000]


def test_fixed_limits_need_no_measurement(model: LoadedModel) -> None:
    llm = LLM(model)
    slo = measure_slo(FIXED.options, llm, [_request(4)])
    assert slo == FIXED and llm.engine.stats.steps == 0
    assert slo.section() == {"ttft_ms": 500.0, "tpot_ms": 30.0}


def test_the_section_says_which_limits_hold() -> None:
    """Scales that were replaced by a fixed limit stood in the results as if they had been used."""
    section = SLO(options=SLOOptions(tpot_ms=30.0), unloaded=CURVE).section()
    assert section == {
        "ttft_scale": 4.0,
        "tpot_ms": 30.0,
        "unloaded": {
            "prompt_tokens": [10, 30],
            "ttft_ms": [100.0, 200.0],
            "tpot_ms": [10.0, 20.0],
        },
    }


@pytest.mark.parametrize("name", ["ttft_scale", "tpot_scale", "ttft_ms", "tpot_ms"])
def test_limits_that_nothing_can_meet_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"evaluation\.slo\.{name}=0 must be a number above 0"):
        SLOOptions(**{name: 0})


def test_a_relative_limit_without_a_curve_is_refused() -> None:
    with pytest.raises(ValueError, match="set both evaluation"):
        SLO(options=SLOOptions(ttft_ms=1.0))
