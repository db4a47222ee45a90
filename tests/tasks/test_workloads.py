"""Guards runs under arrivals: what was served, clipped and reached is in the results, mistakes show early."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.jobs import run_in
from tokenrouter import SamplingParams
from tokenrouter.evaluation.throughput import Repeat, Throughput
from tokenrouter.outputs import CompletionOutput, RequestOutput
from tokenrouter.tasks import build
from tokenrouter.tasks.comparison_report import scheduling_notes
from tokenrouter.workloads import RequestSet, RequestSpec

BENCHMARK = ("debug=tiny", "task=benchmark")


def _run(path: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    run_in(path, *BENCHMARK, *overrides)
    metrics: dict[str, Any] = json.loads((path / "metrics.json").read_text())
    return metrics, (path / "table.md").read_text()


def test_a_run_with_arrivals_reports_both_times_and_goodput(tmp_path: Path) -> None:
    metrics, table = _run(tmp_path, "workload=poisson", "workload.num_requests=6")
    throughput, latency = metrics["throughput"], metrics["latency"]
    workload = throughput["workload"]
    assert workload["num_requests"] == 6 and workload["arrival_span_s"] > 1.0
    assert throughput["busy_s"] < throughput["makespan_s"] >= workload["arrival_span_s"]
    output_tok_s = workload["output_tokens"] / throughput["busy_s"]
    assert throughput["output_tok_s"] == pytest.approx(output_tok_s)
    good = 6 * latency["goodput_frac"] / throughput["makespan_s"]
    assert latency["goodput_requests_s"] == pytest.approx(good)
    assert latency["slo"]["ttft_scale"] == 4.0 and latency["slo"]["tpot_scale"] == 2.0
    assert "6 requests arriving over" in table and "goodput %" in table
    ends = [
        json.loads(line)["end_ms"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()
    ]
    assert ends == sorted(ends) and ends[-1] >= 1e3 * workload["arrival_span_s"]


def test_what_was_clipped_is_in_the_results_and_in_the_notes(tmp_path: Path) -> None:
    limits = ("workload.max_prompt_tokens=50", "workload.max_output_tokens=4")
    metrics, table = _run(tmp_path, "workload=seed_mix", "workload.num_requests=5", *limits)
    workload = metrics["throughput"]["workload"]
    assert workload["clipped_requests"] == 5 and workload["output_tokens"] == 20
    assert (
        f"5 of 5 requests were clipped to the longest that is allowed: "
        f"{workload['clipped_prompt_tokens']:,} prompt tokens and "
        f"{workload['clipped_output_tokens']:,} output tokens were cut."
    ) in table


def test_fixed_limits_are_the_ones_that_count(tmp_path: Path) -> None:
    """Every request meets an hour, and none a nanosecond."""
    limits = ("evaluation.slo.ttft_ms=3.6e6", "evaluation.slo.tpot_ms=3.6e6")
    metrics, _ = _run(tmp_path / "hour", *limits)
    assert metrics["latency"]["goodput_frac"] == 1.0
    assert metrics["latency"]["slo"] == {"ttft_ms": 3.6e6, "tpot_ms": 3.6e6}
    metrics, _ = _run(tmp_path / "ns", "evaluation.slo.ttft_ms=1e-6")
    assert metrics["latency"]["goodput_frac"] == metrics["latency"]["goodput_requests_s"] == 0.0


def test_uniform_requests_say_that_scheduling_cannot_pay(tmp_path: Path) -> None:
    small = ("workload.prompt_tokens=9", "workload.output_tokens=3")
    _, table = _run(tmp_path, "workload=uniform", *small)
    assert (
        "Token-level scheduling cannot pay here, because all 8 requests have 9 tokens in and 3 out "
        "and arrive at once: static_batch reaches "
    ) in table


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("workload=mooncake", "paths.data_dir=null"), "needs a folder of local data sets"),
        (("workload=poisson", "workload.rate_scale=0"), "rate_scale=0 must be a number above 0"),
        (
            ("evaluation.slo.ttft_scale=-1",),
            r"evaluation\.slo\.ttft_scale=-1 must be a number above 0",
        ),
        (("evaluation.slo=null",), r"evaluation\.slo must hold options, got None"),
        (("+evaluation.slo.ttft=9",), r"evaluation\.slo\.ttft is no option of SLOOptions"),
        (("workload=poisson", "+workload.cv=3"), r"workload\.cv is no option of PoissonRequests"),
    ],
)
def test_a_mistake_shows_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], message: str
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(build, "load", load)
    with pytest.raises(Exception, match=message):
        run_in(tmp_path, *BENCHMARK, *overrides)


def _served(*rates_tok_s: float) -> Throughput:
    """Passes of one request with 100 output tokens at these rates."""
    completion = CompletionOutput(index=0, text="", delta="", token_ids=(7,) * 100)
    output = RequestOutput(
        request_id="0", prompt=None, prompt_token_ids=(1,), outputs=(completion,), finished=True
    )
    stats: Any = None
    return Throughput(
        repeats=tuple(
            Repeat(wall_s=100 / rate, outputs=(output,), stats=stats, steps=(), high_frac=1.0)
            for rate in rates_tok_s
        )
    )


def _workload(*outputs: int) -> RequestSet:
    params = (SamplingParams(max_tokens=n, ignore_eos=True) for n in outputs)
    return RequestSet(requests=tuple(RequestSpec(prompt_ids=(1, 2), params=p) for p in params))


@pytest.mark.parametrize(
    ("static", "says"),
    [
        ((50.0, 60.0), None),
        ((50.0, 80.0), "within the spread of the passes."),
        ((120.0, 130.0), "continuous batching (all_high) 90.0 [80.0, 100.0]."),
    ],
)
def test_the_notes_say_where_scheduling_did_not_pay(
    static: tuple[float, ...], says: str | None
) -> None:
    """A speed-up over static batching that is noise, shown without a word."""
    served = {"all_high": _served(80.0, 100.0), "static_batch": _served(*static)}
    lines = scheduling_notes(_workload(3, 50), served)
    assert len(lines) == (says is not None)
    if says is not None:
        assert lines[0].endswith(says) and "did not pay" in lines[0]


def test_equal_requests_are_named_whatever_was_measured() -> None:
    served = {"all_high": _served(100.0), "static_batch": _served(50.0)}
    [line] = scheduling_notes(_workload(7, 7, 7), served)
    assert "all 3 requests have 2 tokens in and 7 out" in line and "50.0 [50.0, 50.0]" in line
    [line] = scheduling_notes(_workload(7), served)
    assert "because there is one request: static_batch reaches" in line
    assert not scheduling_notes(_workload(7, 7), {"all_high": _served(100.0)})
