"""Guards the benchmark script: keys that others read, and a random baseline with another share."""

import json
from typing import Any

import pytest

from scripts import bench_engine
from scripts.bench_engine import Sizes
from tokenrouter import kernels
from tokenrouter.kernels import KernelSet
from tokenrouter.models import tiny_random
from tokenrouter.models.tiny import tiny_hf
from tokenrouter.routers import RandomRouter

KEYS = {
    "all_high_vs_transformers",
    "routed_vs_all_high",
    "routed_vs_transformers",
    "all_low_vs_all_high",
    "prefill256_low_vs_high",
    "prefill1024_low_vs_high",
    "prefill1024_high_vs_transformers",
    "prefill1024_low_vs_transformers",
    "decode1_low_vs_high",
    "decode32_low_vs_high",
    "decode32_routed_vs_low",
}
VALUES = {
    "routed_high_frac",
    "routed_high_frac_prefill",
    "routed_high_frac_decode",
    "router_overhead_frac",
    "routed_kl_mean_nats",
    "random_kl_mean_nats",
    "all_high_kl_mean_nats",
    "all_low_kl_mean_nats",
    "routed_eval_high_frac",
    "random_eval_high_frac",
}


@pytest.fixture(scope="module")
def bench() -> bench_engine.Bench:
    sizes = Sizes(
        prompt_lengths=(5, 20, 40, 80),
        output_max=10,
        decode_context=16,
        decode_steps=4,
        window_tokens=512,
        num_windows=2,
    )
    return bench_engine.build(tiny_random(), tiny_hf(), sizes, repeats=2, high_frac=0.1)


@pytest.fixture(scope="module")
def result(bench: bench_engine.Bench) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(bench_engine.run(bench), allow_nan=False))
    return found


def test_every_key_that_others_read_is_there(result: dict[str, Any]) -> None:
    settings = {"decode32_context", "executors", "kernels", "repeats", "quick", "ranges"}
    assert set(result) == KEYS | VALUES | settings
    assert result["decode32_context"] == 16 and result["repeats"] == 2 and not result["quick"]


def test_every_ratio_lies_within_its_turns(result: dict[str, Any]) -> None:
    assert set(result["ranges"]) == KEYS
    for key, (smallest, largest) in result["ranges"].items():
        assert 0.0 < smallest <= result[key] <= largest, key


def test_random_has_the_share_that_the_rules_have_on_the_same_windows(
    result: dict[str, Any], bench: bench_engine.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had the budget's nominal share, which the rules miss on windows longer than a request."""
    shares: list[float] = []

    class Recorded(RandomRouter):
        def __init__(self, high_frac: float) -> None:
            super().__init__(high_frac=high_frac)
            shares.append(high_frac)

    monkeypatch.setattr(bench_engine, "RandomRouter", Recorded)
    again = bench_engine.quality(bench)
    assert shares == [again["routed_eval_high_frac"]] and shares[0] != 0.1
    assert again["random_eval_high_frac"] == pytest.approx(shares[0], abs=0.03)
    assert again["routed_kl_mean_nats"] == pytest.approx(result["routed_kl_mean_nats"])


def test_the_reference_runs_on_the_chosen_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--backend`` reached the systems; the model that they are compared with ran on ``auto``."""

    def auto() -> KernelSet:
        raise AssertionError("kernels of the backend auto were asked for")

    monkeypatch.setattr(kernels, "_native_or_reference", auto)
    sizes = Sizes(prompt_lengths=(5,), output_max=10)
    bench = bench_engine.build(
        tiny_random(),
        tiny_hf(),
        sizes,
        repeats=1,
        high_frac=0.1,
        backend="reference",
        dtype="float32",
    )
    assert bench.reference.pool.kernels.name == "reference"


def test_ratios_show_their_spread(capsys: pytest.CaptureFixture[str]) -> None:
    bench_engine.ratios({"a": [1.0, 2.0, 4.0], "b": [4.0, 4.0, 4.0]}, a_vs_b=("a", "b"))
    assert "a_vs_b" in (shown := capsys.readouterr().out) and "2.000   [1.000, 4.000]" in shown


def test_only_pools_with_both_paths_can_be_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_engine.py", "--pool", "full"])
    with pytest.raises(SystemExit):
        bench_engine.parse_arguments()
    assert "choose from" in (shown := capsys.readouterr().err) and "int8" in shown
    monkeypatch.setattr("sys.argv", ["bench_engine.py", "--backend", "reference", "--quick"])
    chosen = bench_engine.parse_arguments()
    assert (chosen.pool, chosen.backend, chosen.quick) == ("int8", "reference", True)
