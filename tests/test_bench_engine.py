"""Guards the benchmark script: keys that others read, and a random baseline with another share."""

import json
from typing import Any

import pytest

from scripts.engine_bench import app, measures
from scripts.engine_bench.quality import matched_random, quality
from scripts.engine_bench.setup import Bench, Sizes, build
from tokenrouter import kernels
from tokenrouter.features import FeatureExtractor, sequence_batch
from tokenrouter.kernels import KernelSet
from tokenrouter.models import tiny_random
from tokenrouter.models.tiny import tiny_hf
from tokenrouter.routers import HIGH

KEYS = {
    "all_high_vs_transformers",
    "routed_vs_all_high",
    "routed_vs_transformers",
    "all_low_vs_all_high",
    "shared_high_vs_all_high",
    "shared_routed_vs_shared_high",
    "shared_routed_vs_all_high",
    "shared_routed_vs_transformers",
    "prefill256_low_vs_high",
    "prefill256_shared_high_vs_high",
    "prefill1024_low_vs_high",
    "prefill1024_high_vs_transformers",
    "prefill1024_low_vs_transformers",
    "prefill1024_column_sums_frac",
    "decode1_low_vs_high",
    "decode1_head_low_bandwidth_frac",
    "decode32_low_vs_high",
    "decode32_routed_vs_low",
    "decode32_shared_routed_vs_low",
    "decode32_high_vs_reference_kernels",
    "decode32_received_frac",
}
SIGNED = {
    "prefill1024_column_sums_frac",
    "decode32_received_frac",
}  # overheads, below zero in noise
SHARES = ("routed", "shared_routed")
VALUES = {
    *(f"{name}_high_frac{phase}" for name in SHARES for phase in ("", "_prefill", "_decode")),
    "router_overhead_frac",
    "shared_router_overhead_frac",
    *(
        f"{name}_kl_mean_nats"
        for name in (*SHARES, "random", "shared_random", "all_high", "all_low", "shared_high")
    ),
    *(f"{name}_eval_high_frac" for name in (*SHARES, "random", "shared_random")),
}


@pytest.fixture(scope="module")
def bench() -> Bench:
    sizes = Sizes(
        prompt_lengths=(5, 20, 40, 80),
        output_max=10,
        decode_context=16,
        decode_steps=4,
        window_tokens=512,
        num_windows=2,
        copy_bytes=4096,
    )
    return build(tiny_random(), tiny_hf(), sizes, repeats=2, high_frac=0.1)


@pytest.fixture(scope="module")
def result(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(app.run(bench), allow_nan=False))
    return found


def test_every_key_that_others_read_is_there(result: dict[str, Any]) -> None:
    settings = {"decode32_context", "executors", "kernels", "repeats", "quick", "ranges"}
    assert set(result) == KEYS | VALUES | settings
    assert result["decode32_context"] == 16 and result["repeats"] == 2 and not result["quick"]


def test_every_ratio_lies_within_its_turns(result: dict[str, Any]) -> None:
    assert set(result["ranges"]) == KEYS
    for key, (smallest, largest) in result["ranges"].items():
        assert smallest <= result[key] <= largest, key
        assert smallest > (-1.0 if key in SIGNED else 0.0), key


def test_routed_meets_its_budget_where_its_kl_is_measured(result: dict[str, Any]) -> None:
    """Its thresholds were those of passages as long as requests: 1.3 % of 10 % in long windows."""
    for name in SHARES:
        assert result[f"{name}_eval_high_frac"] == pytest.approx(0.1, rel=0.25)
        assert result[f"{name}_high_frac"] > 0.0


def test_random_has_the_share_that_the_rules_have_on_the_same_windows(
    result: dict[str, Any], bench: Bench
) -> None:
    """It had the rules' share in expectation, and on a few windows half as much again."""
    for name, other in zip(SHARES, ("random", "shared_random"), strict=True):
        share = result[f"{name}_eval_high_frac"]
        assert result[f"{other}_eval_high_frac"] == pytest.approx(share, rel=0.05)
    again = quality(bench)
    assert again["routed_kl_mean_nats"] == pytest.approx(result["routed_kl_mean_nats"])


@pytest.mark.parametrize("num_high", [0, 1, 7, 99, 100])
def test_matched_random_sends_exactly_so_many_of_the_tokens_high(
    bench: Bench, num_high: int
) -> None:
    texts, types = [bench.ids[:60], bench.ids[200:240]], bench.systems["routed"].token_types
    router = matched_random(texts, num_high / 100, types)
    extractor = FeatureExtractor((), types)
    routes = [router.route(extractor.extract(sequence_batch(ids))).route_T for ids in texts]
    assert sum(int((route_T == HIGH).sum()) for route_T in routes) == num_high


def test_serving_keeps_thresholds_of_its_own(bench: Bench) -> None:
    """One router for both engines would serve requests with the thresholds of the windows."""
    before = bench.systems["routed"].router.version
    quality(bench)
    assert bench.systems["routed"].router.version == before


def test_the_reference_runs_on_the_chosen_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--backend`` reached the systems; the model that they are compared with ran on ``auto``."""

    def auto() -> KernelSet:
        raise AssertionError("kernels of the backend auto were asked for")

    monkeypatch.setattr(kernels, "_native_or_reference", auto)
    sizes = Sizes(prompt_lengths=(5,), output_max=10)
    bench = build(
        tiny_random(),
        tiny_hf(),
        sizes,
        repeats=1,
        high_frac=0.1,
        backend="reference",
        dtype="float32",
    )
    assert bench.float32.pool.kernels.name == "reference"


def test_ratios_show_their_spread(capsys: pytest.CaptureFixture[str]) -> None:
    measures.ratios({"a": [1.0, 2.0, 4.0], "b": [4.0, 4.0, 4.0]}, a_vs_b=("a", "b"))
    assert "a_vs_b" in (shown := capsys.readouterr().out) and "2.000   [1.000, 4.000]" in shown


def test_overheads_are_shares_of_the_time_without(capsys: pytest.CaptureFixture[str]) -> None:
    """A ratio of rates where a share was asked for."""
    found = measures.overheads({"a": [1.1, 2.2, 4.4], "b": [1.0, 2.0, 4.0]}, more=("a", "b"))
    assert found["more"].median == pytest.approx(0.1) and "more" in capsys.readouterr().out


def test_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench_engine.py", "--backend", "reference", "--quick"])
    chosen = app.parse_arguments("")
    assert (chosen.backend, chosen.quick, chosen.repeats) == ("reference", True, 5)
