"""Guards what runs say of routers around routers: cached, interval, batched, composite and the oracle."""

import json
from pathlib import Path

import pytest
from hydra.errors import InstantiationException

from tests.tasks.jobs import run_in
from tokenrouter.tasks.prepare import Setup

BENCHMARK = ("debug=tiny", "task=benchmark")


def test_a_cold_cache_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A cache that costs more than it saves, and a run that keeps silent about it."""
    path = run_in(tmp_path, *BENCHMARK, "router=cached", "router.key=exact")
    written = json.loads((path / "metrics.json").read_text())["router"]
    assert 0.0 <= written["cache_hit_frac"] < 0.4
    assert written["decided_frac"] == 1.0
    note = f"The router's cache spared {written['cache_hit_frac']:.0%} of the tokens a decision"
    assert note in (path / "table.md").read_text()
    assert sum(note in record.message for record in caplog.records) == 1


def test_a_warm_cache_is_not(tmp_path: Path) -> None:
    """Equal tokens of one step that count as misses, or a warning that is always there."""
    rounds = ("router.exact_below=1", "router.steps_per_octave=1")
    path = run_in(tmp_path, *BENCHMARK, "router=cached", *rounds)
    written = json.loads((path / "metrics.json").read_text())["router"]
    assert 0.4 <= written["cache_hit_frac"] < 1.0
    assert "router's cache" not in (path / "table.md").read_text()


def test_an_interval_decides_a_part_of_the_tokens(tmp_path: Path) -> None:
    """A share of decided tokens that counts those that repeat."""
    path = run_in(tmp_path, *BENCHMARK, "router=interval", "router.every=8")
    written = json.loads((path / "metrics.json").read_text())["router"]
    assert 1 / 8 <= written["decided_frac"] < 1 / 4
    assert "cache_hit_frac" not in written


@pytest.mark.parametrize("router", ["batched", "composite"])
def test_the_main_job_runs(tmp_path: Path, router: str) -> None:
    """Names of routes that a table, a plot or a baseline does not expect; budgets of parts that nobody sets."""
    part = {"batched": "inner", "composite": "precision"}[router]
    path = run_in(tmp_path, "debug=tiny", f"router={router}", f"router.{part}.budget.high_frac=0.3")
    written = json.loads((path / "metrics.json").read_text())
    names = {"batched": {"high", "low"}}.get(
        router, {f"{p}+{k}" for p in ("high", "low") for k in ("protect", "normal")}
    )
    assert set(written["routes"]) == names
    assert written["quality"]["kl_mean_nats"] >= 0.0
    high = sum(v["token_frac"] for k, v in written["routes"].items() if k.startswith("high"))
    assert 0.1 < high < 0.6


def test_pairs_have_their_classes_with_the_policy_that_goes_by_them(tmp_path: Path) -> None:
    """A policy that looks for its own route names among the pairs, and refuses what the config advises."""
    path = run_in(
        tmp_path,
        *BENCHMARK,
        "router=composite",
        "router.classes.low=drop_first",
        "kvcache=route",
        "+kvcache.retention.policy.classes={high+protect: protect}",
        "kvcache.retention.interval=16",
        "kvcache.retention.recent=4",
    )
    assert json.loads((path / "metrics.json").read_text())["kv"]["evicted_tokens"] > 0


def test_one_command_labels_what_the_oracle_then_routes(
    tmp_path: Path, setups: list[Setup]
) -> None:
    """Labels of other windows than those that are measured, or under other prefixes than forced scoring feeds."""
    labels = tmp_path / "oracle.safetensors"
    tiny = ("debug=tiny", "executor=int8", "kernels.backend=reference")
    job = ("task=collect_oracle", "labels=own_loss", f"oracle.path={labels}")
    folder = run_in(tmp_path / "collect", *tiny, *job)
    collected = json.loads((folder / "collected.json").read_text())
    oracle = ("router=oracle", f"router.path={labels}", "router.budget.high_frac=0.25")
    path = run_in(tmp_path / "run", *tiny, "task=evaluate", *oracle)
    assert collected["num_windows"] == len(setups[0].windows)
    routes = json.loads((path / "metrics.json").read_text())["quality"]["routes"]
    assert routes["high"]["prefill_token_frac"] == pytest.approx(0.25, abs=0.01)
    with pytest.raises(ValueError, match=r"oracle has no label for .*task=collect_oracle"):
        run_in(tmp_path / "served", *BENCHMARK, *oracle)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("labels=future_attention", "labels=future_attention says how long .*labels=fisher"),
        ("oracle.path=labels.json", r"oracle\.path=labels\.json must end in \.safetensors"),
        ("oracle.path=none/a.safetensors", "there is no folder none"),
    ],
)
def test_labels_that_no_oracle_reads_are_refused(tmp_path: Path, given: str, says: str) -> None:
    """They came up after all windows were labelled, or in the run that was to read them."""
    with pytest.raises((ValueError, InstantiationException), match=says):
        run_in(tmp_path, "debug=tiny", "task=collect_oracle", given)
