"""Guards the scheduling benchmark: keys that others read, other work than conf's, and weak baselines."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from scripts.schedule_bench import app
from scripts.schedule_bench.kv import int8_kv
from scripts.schedule_bench.measures import Served, serve_at_once, serve_poisson
from scripts.schedule_bench.report import TITLE, as_values, format_served
from scripts.schedule_bench.setup import (
    QUICK,
    STATIC,
    TOKEN_LEVEL,
    Bench,
    Sizes,
    arriving,
    build,
    make_workloads,
)
from tokenrouter.models import LoadedModel, tiny_random
from tokenrouter.models.tiny import ByteTokenizer
from tokenrouter.telemetry import Spread
from tokenrouter.workloads import RequestSpec
from tokenrouter.workloads.base import greedy

ROOT = Path(__file__).resolve().parent.parent
KEY_OF = {"tok_s": "output_tok_s", "ttft_p99": "ttft_ms_p99"}
CLAIMS = {f"tokenlevel_vs_static{size}_{name}" for size in ("", "2", "4") for name in KEY_OF}
RATIOS = CLAIMS | {"int8_kv_decode2k_vs_full", "small_kv_decode2k_vs_full"}
BYTES = {"int8_kv_bytes_frac", "small_kv_bytes_frac"}
FACTS = {"ranges", "tokenlevel", "baselines", "workloads", "kernels", "sizes", "repeats", "quick"}
LATENCIES = {
    f"{name}_ms_{percentile}"
    for name in ("ttft", "tpot", "e2e", "queue")
    for percentile in ("p50", "p99")
}


def tiny(name: str, *, dtype: str) -> LoadedModel:
    assert name == app.MODEL
    return tiny_random(dtype=dtype)


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """What the script prints with ``--quick`` on a tiny model, in lines."""
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(shown):
        patch.setattr("sys.argv", ["bench_schedule.py", "--quick", "--repeats", "2"])
        patch.setattr(app, "load_model", tiny)
        app.main("")
    return shown.getvalue().splitlines()


@pytest.fixture(scope="module")
def result(printed: list[str]) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found: dict[str, Any] = json.loads(printed[-1], parse_constant=refuse)
    return found


@pytest.fixture(scope="module")
def bench() -> Bench:
    return build(tiny_random(dtype="bfloat16"), QUICK, repeats=1)


def served(*, is_uniform: bool = False, **numbers: list[tuple[float, float]]) -> Served:
    """Output tok/s and p99 TTFT of passes that were not run; other numbers are the TTFT. Two requests."""
    request = RequestSpec(prompt_ids=(5, 6), params=greedy(3))
    return Served(
        name="made_up",
        requests=[request, request],
        numbers={
            name: [
                dict.fromkeys(LATENCIES, ttft) | {"output_tok_s": tok_s, "requests_s": tok_s / 3}
                for tok_s, ttft in passes
            ]
            for name, passes in numbers.items()
        },
        baselines={
            size: names for size, names in QUICK.baselines.items() if set(names) <= set(numbers)
        },
        is_uniform=is_uniform,
    )


def test_every_key_that_others_read_is_there(result: dict[str, Any]) -> None:
    assert set(result) == RATIOS | FACTS | BYTES | {"provenance"}
    assert result["quick"] and result["repeats"] == 2 and result["tokenlevel"] == TOKEN_LEVEL
    assert result["provenance"]["model"] == app.MODEL and result["provenance"]["model_hash"]
    assert list(result["workloads"]) == ["mixed_lengths", "crowd", "poisson", "uniform"]
    for workload in result["workloads"].values():
        assert list(workload["systems"]) == list(QUICK.schedules)
        assert set(workload) > CLAIMS
        for numbers in workload["systems"].values():
            assert set(numbers) >= LATENCIES | {"output_tok_s", "vs_static_output_tok_s"}


def test_ratios_are_those_of_the_published_workload(result: dict[str, Any]) -> None:
    """A ratio of another workload, or of the static batch that makes it look best."""
    assert set(result["ranges"]) == RATIOS
    for key, (smallest, largest) in result["ranges"].items():
        assert 0.0 < smallest <= result[key] <= largest, key
    systems = result["workloads"]["crowd"]["systems"]
    sizes = {"": STATIC, "2": STATIC, "4": QUICK.baselines[4]}
    for size, baselines in sizes.items():
        for name, key in KEY_OF.items():
            claim = f"tokenlevel_vs_static{size}_{name}"
            found = result["workloads"]["crowd"][claim]
            assert found["value"]["median"] == result[claim]
            assert found["baseline"] == result["baselines"][claim] in baselines
            medians = [systems[baseline][key]["median"] for baseline in baselines]
            best = max(medians) if key == "output_tok_s" else min(medians)
            assert systems[result["baselines"][claim]][key]["median"] == best


def test_there_is_a_table_per_workload(printed: list[str], result: dict[str, Any]) -> None:
    for name in result["workloads"]:
        start = next(i for i, line in enumerate(printed) if line.startswith(f"{name}: "))
        rows = printed[start + 2 : start + 2 + len(QUICK.schedules)]
        assert [row.split()[0] for row in rows] == list(QUICK.schedules)
        assert {len(row) for row in rows} == {len(TITLE)}
    last = [line for line in printed if "leave nothing to schedule" in line]
    assert len(last) == 2 * len(QUICK.baselines), "uniform, in throughput and in TTFT"


def test_workloads_are_those_of_conf() -> None:
    """Numbers copied from conf/workload that no longer are what it has."""
    workloads, encode = make_workloads(Sizes()), ByteTokenizer().encode
    for name in ("mixed_lengths", "uniform"):
        config = OmegaConf.load(ROOT / "conf" / "workload" / f"{name}.yaml")
        published = instantiate(OmegaConf.create({"seed": 0, "workload": config}).workload)
        text = list(range(3000))
        assert published.requests(encode, text) == workloads[name].requests(encode, text)


def test_a_crowd_has_more_requests_than_seats() -> None:
    """With a seat for each of them nobody waits, and the policies would not differ."""
    for sizes in (Sizes(), QUICK):
        assert sizes.crowd_requests > sizes.seats == max(sizes.static_batches)
        crowd = make_workloads(sizes)["crowd"].requests(ByteTokenizer().encode, list(range(3000)))
        lengths = [len(r.prompt_ids) for r in crowd]
        assert len(crowd) == sizes.crowd_requests and set(lengths) == set(sizes.prompt_lengths)
        period = len(sizes.prompt_lengths)
        assert lengths[:period] != lengths[period : 2 * period], "every static batch has the same"


def test_systems_differ_in_their_schedule_only(bench: Bench) -> None:
    """A static batch of the default size beside seats that were lowered, or a router that is not all_high."""
    for name, llm in bench.systems.items():
        assert llm.router.name == "all_high" and llm.pool is bench.systems[TOKEN_LEVEL].pool
        options = QUICK.schedules[name]
        assert llm.engine.scheduler.name == options.scheduler
        assert llm.engine.scheduler.limits.phase_order == options.phase_order
        assert llm.engine.scheduler.limits.max_num_seqs == QUICK.seats
    for size, names in QUICK.baselines.items():
        for name in names:
            assert bench.systems[name].engine.scheduler.batch_size == size


def test_static_batches_of_every_size_run_beside_the_token_level() -> None:
    """Batches of 8 beside 32 seats: a part of the ratio was that more requests ran at once."""
    baselines = Sizes().baselines
    assert list(baselines) == [8, 16, 32] and baselines[8] == tuple(STATIC)
    assert baselines[32] == ("static_batch_32", "static_prefill_first_32")
    schedules = Sizes(static_batch=16).schedules
    assert schedules["static_batch"].static_batch_size == 16
    assert schedules["static_prefill_first_8"].static_batch_size == 8
    assert schedules["static_prefill_first_8"].phase_order == "prefill_first"
    assert list(Sizes(static_batch=12).baselines) == [12, 8, 16, 32]


def test_poisson_has_the_crowds_requests_at_a_share_of_its_rate(bench: Bench) -> None:
    """A fixed rate is idle on one machine and hopeless on another."""
    crowd = serve_at_once(bench, "crowd")
    (rate,) = crowd.of(TOKEN_LEVEL, "requests_s")
    found = serve_poisson(bench, crowd)
    assert found.rate_requests_s == pytest.approx(QUICK.load_frac * rate)
    assert found.requests == arriving(crowd.requests, found.rate_requests_s)
    assert [r.prompt_ids for r in found.requests] == [r.prompt_ids for r in crowd.requests]
    many = arriving([RequestSpec(prompt_ids=(5,), params=greedy(1))] * 2001, 4.0)
    assert many[0].arrival_s == 0.0 and many[-1].arrival_s == pytest.approx(500.0, rel=0.1)


def test_each_ratio_has_the_better_baseline_of_its_own_number() -> None:
    """The slower of two static batches, or the largest TTFT taken for the best one."""
    found = served(
        fcfs=[(30.0, 8.0), (40.0, 6.0), (60.0, 5.0)],
        static_batch=[(10.0, 10.0)] * 3,
        static_prefill_first=[(20.0, 16.0)] * 3,
    )
    tok_s, ttft = found.ratio("output_tok_s"), found.ratio("ttft_ms_p99")
    assert tok_s.baseline == "static_prefill_first" and ttft.baseline == "static_batch"
    assert tok_s.value == Spread(median=2.0, min=1.5, max=3.0)
    assert ttft.value == Spread(median=0.6, min=0.5, max=0.8)
    assert tok_s.pays and ttft.pays and "does not pay" not in format_served(found)
    own = as_values(found)["systems"]["static_batch"]
    assert own["vs_static_output_tok_s"]["median"] == 0.5 and own["ttft_ms_p99"]["max"] == 10.0


def test_each_size_has_its_own_ratio_and_the_default_one_stays() -> None:
    """A larger static batch that only replaced the default baseline, or that was compared with it."""
    found = served(
        fcfs=[(30.0, 8.0)],
        static_batch=[(10.0, 16.0)],
        static_prefill_first=[(15.0, 20.0)],
        static_batch_4=[(24.0, 10.0)],
        static_prefill_first_4=[(20.0, 5.0)],
    )
    values = as_values(found)
    medians = {claim: values[claim]["value"]["median"] for claim in CLAIMS}
    assert medians == {
        "tokenlevel_vs_static_tok_s": 2.0,
        "tokenlevel_vs_static_ttft_p99": 0.5,
        "tokenlevel_vs_static2_tok_s": 2.0,
        "tokenlevel_vs_static2_ttft_p99": 0.5,
        "tokenlevel_vs_static4_tok_s": 1.25,
        "tokenlevel_vs_static4_ttft_p99": 1.6,
    }
    assert values["tokenlevel_vs_static4_tok_s"]["baseline"] == "static_batch_4"
    assert values["tokenlevel_vs_static4_tok_s"]["pays"]
    assert not values["tokenlevel_vs_static4_ttft_p99"]["pays"]
    assert format_served(found).count("Static batches of") == 2


def test_the_report_says_where_token_level_scheduling_does_not_pay() -> None:
    """A median that is better by noise counted as a gain; no word where static wins."""
    overlapping = served(
        fcfs=[(30.0, 8.0), (19.0, 2.0)],
        static_batch=[(20.0, 9.0), (15.0, 9.0)],
        static_prefill_first=[(10.0, 9.0)] * 2,
    )
    text = format_served(overlapping)
    assert "does not pay in output tok/s: a pass of static is as good" in text
    assert "does not pay in p99 TTFT" not in text
    better = {"fcfs": [(30.0, 8.0)]} | {name: [(20.0, 9.0)] for name in STATIC}
    assert "does not pay" not in format_served(served(**better))
    noise = format_served(served(**better, is_uniform=True))
    assert noise.count("does not pay") == noise.count("nothing to schedule") == 2


def test_only_equal_requests_that_fit_one_static_batch_leave_nothing_to_schedule(
    bench: Bench,
) -> None:
    """Equal requests in several static batches do wait for whole batches."""
    assert serve_at_once(bench, "uniform").is_one_batch(2)
    assert not serve_at_once(bench, "mixed_lengths").is_one_batch(4)
    bench.requests["two_batches"] = bench.requests["uniform"] * 2
    two = serve_at_once(bench, "two_batches")
    assert not two.is_one_batch(2) and two.is_one_batch(4)


def test_int8_kv_is_int8_kv(bench: Bench) -> None:
    """Two engines with the same entries, or peaks of different steps."""
    found = int8_kv(bench)
    (_, frac), (_, small_frac) = found["int8"], found["small"]
    head_dim = bench.kv["full"].model.config.head_dim
    assert frac == pytest.approx((head_dim + 4) / (2 * head_dim))
    tokens = QUICK.decode_batch * (QUICK.decode_context + 2 * QUICK.decode_steps)
    slots = [llm.engine.stats.peak_live_slots for llm in bench.kv.values()]
    assert slots[0] == slots[1] == slots[2] >= tokens
    assert frac < small_frac <= 1


def test_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that is read and does not reach the systems."""
    monkeypatch.setattr("sys.argv", ["bench_schedule.py"])
    assert app.parse_arguments("").sizes == Sizes()
    monkeypatch.setattr("sys.argv", ["bench_schedule.py", "--static-batch", "32"])
    chosen = app.parse_arguments("")
    assert (chosen.sizes.static_batch, chosen.quick, chosen.repeats) == (32, False, 3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--static-batch", "33"], "--static-batch must lie in 1 .. 32, the requests that run"),
        (["--quick", "--static-batch", "0"], "--static-batch must lie in 1 .. 4, the requests"),
    ],
)
def test_wrong_arguments_are_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    """They came up after a minute, under the names of other options."""
    monkeypatch.setattr("sys.argv", ["bench_schedule.py", *arguments])
    with pytest.raises(SystemExit):
        app.parse_arguments("")
    assert says in capsys.readouterr().err
