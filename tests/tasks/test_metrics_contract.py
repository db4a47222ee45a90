"""Guards metrics.json: a renamed, lost or undocumented key, a value of another type."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.jobs import run_in
from tokenrouter.tasks.comparison_report import REQUEST_LEVEL_NOTE
from tokenrouter.tasks.prepare import Setup
from tokenrouter.telemetry.runfolder import SECTIONS, leaves

ROOT = Path(__file__).resolve().parents[2]
BASELINES = ("all_high", "all_low", "request_level", "static_batch")
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "queue_ms")
KL = ("kl_mean_nats", "kl_high_mean_nats")

EXPECTED = {
    *(f"quality.{name}" for name in (*KL, "ppl", "ppl_rel_pct", "top1_agreement_frac")),
    *(f"quality.{phase}.{name}" for phase in ("prefill", "decode") for name in KL),
    *(f"quality.prefill.by_position.{b}.{name}" for b in ("0_1", "1_16", "16_256") for name in KL),
    *(f"quality.decode.by_position.16_256.{name}" for name in KL),
    *(
        f"quality.routes.{route}.{phase}_token_frac"
        for route in ("high", "low")
        for phase in ("prefill", "decode")
    ),
    *(
        f"generations.{name}"
        for name in (
            "num_texts",
            "same_output_frac",
            "common_tokens_mean",
            "length_ratio",
            "chrf",
        )
    ),
    *(f"throughput.{name}" for name in ("output_tok_s", "total_tok_s", "requests_s")),
    "throughput.busy_s",
    "throughput.makespan_s",
    *(
        f"throughput.workload.{name}"
        for name in (
            "num_requests",
            "prompt_tokens",
            "output_tokens",
            "arrival_span_s",
            "clipped_requests",
            "clipped_prompt_tokens",
            "clipped_output_tokens",
            "wrapped_requests",
        )
    ),
    *(f"throughput.speedup_vs_{name}" for name in ("all_high", "request_level", "static_batch")),
    *(f"latency.{name}.{stat}" for name in LATENCIES for stat in ("mean", "p50", "p90", "p99")),
    "latency.goodput_frac",
    "latency.goodput_requests_s",
    "latency.slo.ttft_scale",
    "latency.slo.tpot_scale",
    *(f"latency.slo.unloaded.{name}" for name in ("prompt_tokens", "ttft_ms", "tpot_ms")),
    *(f"router.{name}" for name in ("us_per_token", "overhead_frac", "decided_frac", "version")),
    *(
        f"routes.{route}.{name}"
        for route in ("high", "low")
        for name in (
            "executor",
            "high_layers_frac",
            "token_frac",
            "prefill_token_frac",
            "decode_token_frac",
            "ms_per_token",
            "degraded_frac",
        )
    ),
    "kv.peak_live_bytes",
    "kv.peak_allocated_bytes",
    "kv.saved_frac",
    "kv.shared_tokens",
    "kv.evicted_tokens",
    "kv.int8_tokens",
    "kv.compactions",
    *(
        f"kv.preemption.{name}"
        for name in ("preemptions", "swaps_out", "swaps_in", "recomputes", "recomputed_tokens")
    ),
    "memory.peak_process_bytes",
    *(
        f"baselines.{name}.{key}"
        for name in BASELINES
        for key in ("output_tok_s", "kl_mean_nats", "ppl", "ttft_p99_ms", "kv_peak_live_bytes")
    ),
}
TEXTS = {"router.version", "routes.high.executor", "routes.low.executor"}


@pytest.fixture(scope="module")
def metrics(tradeoff_run: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((tradeoff_run / "metrics.json").read_text())
    return result


def test_the_keys_are_exactly_those_of_the_contract(metrics: dict[str, Any]) -> None:
    assert {path for path, _ in leaves(metrics)} == EXPECTED
    assert tuple(metrics) == SECTIONS


def test_values_are_finite_numbers_of_the_kind_their_unit_says(metrics: dict[str, Any]) -> None:
    for path, value in leaves(metrics):
        if path in TEXTS:
            assert isinstance(value, str) and value, path
            continue
        values = value if path.startswith("latency.slo.unloaded.") else [value]
        assert values and all(isinstance(v, int | float) and math.isfinite(v) for v in values), path
        if path.endswith("_frac") and "overhead" not in path:
            assert 0.0 <= value <= 1.0, path
        if path.endswith("_bytes"):
            assert isinstance(value, int) and value > 0, path


def test_the_unloaded_curve_covers_the_workload(metrics: dict[str, Any]) -> None:
    """Limits of longer prompts than were measured would be those of the longest measured one."""
    curve = metrics["latency"]["slo"]["unloaded"]
    lengths = curve["prompt_tokens"]
    assert lengths == sorted(set(lengths)) and (lengths[0], lengths[-1]) == (5, 80)
    assert len(curve["ttft_ms"]) == len(curve["tpot_ms"]) == len(lengths)
    assert min(curve["ttft_ms"] + curve["tpot_ms"]) > 0.0


def test_values_agree_with_each_other(metrics: dict[str, Any]) -> None:
    quality, routes = metrics["quality"], metrics["routes"]
    assert routes["high"]["token_frac"] + routes["low"]["token_frac"] == pytest.approx(1.0)
    for phase in ("prefill_token_frac", "decode_token_frac"):
        assert sum(route[phase] for route in quality["routes"].values()) == pytest.approx(1.0)
    assert quality["kl_high_mean_nats"] == metrics["baselines"]["all_high"]["kl_mean_nats"]
    assert quality["kl_mean_nats"] <= metrics["baselines"]["all_low"]["kl_mean_nats"]
    speedup = metrics["throughput"]["speedup_vs_all_high"]
    all_high = metrics["baselines"]["all_high"]["output_tok_s"]
    assert metrics["throughput"]["output_tok_s"] == pytest.approx(speedup * all_high)
    assert metrics["router"]["version"].startswith("rule-")
    assert metrics["generations"]["num_texts"] == metrics["throughput"]["workload"]["num_requests"]


@pytest.fixture(scope="module")
def glossary() -> dict[str, str]:
    """docs/metrics.md by section: the text below each heading."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    parts = (part.partition("\n") for part in text.split("\n## ")[1:])
    return {title.strip("`"): body for title, _, body in parts}


def _names(metrics: dict[str, Any], section: str) -> set[str]:
    """Every name in a section of metrics.json, at any depth."""
    return {name for path, _ in leaves(metrics[section]) for name in path.split(".")}


def _documented(body: str) -> set[str]:
    """The names in the first column of a section's table."""
    rows = re.findall(r"^\| (`.*?) \|", body, flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_in_the_glossary(
    metrics: dict[str, Any], glossary: dict[str, str], section: str
) -> None:
    """In its own section: a key of the same name elsewhere does not define it."""
    missing = [
        name for name in sorted(_names(metrics, section)) if f"`{name}`" not in glossary[section]
    ]
    assert not missing


@pytest.mark.parametrize("section", SECTIONS)
def test_the_glossary_defines_no_key_that_is_gone(
    metrics: dict[str, Any], glossary: dict[str, str], section: str
) -> None:
    """Only the other direction was checked, so a definition outlived its key."""
    documented = _documented(glossary[section])
    assert documented and not documented - _names(metrics, section)


def test_what_the_glossary_calls_reserved_is_in_no_run_yet(
    metrics: dict[str, Any], glossary: dict[str, str]
) -> None:
    reserved = _documented(glossary["Reserved names"])
    assert reserved and all(name.split(".")[0] in SECTIONS for name in reserved)
    assert not [path for path, _ in leaves(metrics) if path in reserved]


def test_the_table_says_that_request_levels_quality_is_computed(tradeoff_run: Path) -> None:
    """It stood beside measured values as if it had been a run of its own."""
    lines = (tradeoff_run / "table.md").read_text().splitlines()
    assert REQUEST_LEVEL_NOTE in lines
    rows = json.loads((tradeoff_run / "systems.json").read_text())["rows"]
    shares = {row["name"]: row["eval_high_frac"] for row in rows}
    assert shares["request_level"] == pytest.approx(shares["rule"])


def test_evaluate_says_the_shares_that_its_kl_belongs_to(
    tmp_path: Path, setups: list[Setup]
) -> None:
    """The section routes is of the requests, which this task does not serve: KL stood alone."""
    windows = ("evaluation.num_windows=24", "evaluation.decode_windows=24")
    run_in(tmp_path, "debug=tiny", "task=evaluate", "router.budget.high_frac=0.2", *windows)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    shares = metrics["quality"]["routes"]["high"]
    assert shares["prefill_token_frac"] == pytest.approx(0.2, rel=0.25)
    assert shares["decode_token_frac"] == pytest.approx(0.2, rel=0.25)
    [setup] = setups
    held_out = setup.builder.held_out
    assert held_out is not None and held_out.window_tokens == 128 and held_out.decode_tokens == 16
    evaluated = " ".join(map(str, setup.text.ids))
    assert not [ids for ids in held_out.passages() if " ".join(map(str, ids)) in evaluated]
    version = setup.systems.scored["rule"].router.version
    assert version != setup.systems.chosen_llm.router.version
    assert version in (tmp_path / "table.md").read_text()


def test_the_run_folder_holds_what_the_design_lists(tradeoff_run: Path) -> None:
    expected = {
        "config.yaml",
        "overrides.yaml",
        "provenance.json",
        "metrics.json",
        "steps.jsonl",
        "decisions.parquet",
        "status.json",
        "systems.json",
        "table.md",
        "tradeoff.png",
        "routes.png",
    }
    assert expected <= {path.name for path in tradeoff_run.iterdir()}
    assert json.loads((tradeoff_run / "status.json").read_text())["status"] == "ok"
    provenance = json.loads((tradeoff_run / "provenance.json").read_text())
    assert provenance["model"] == "tiny_llama" and provenance["model_hash"]
    assert provenance["extra"]["text_hash"]


def test_decisions_are_those_of_the_requests(tradeoff_run: Path) -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(tradeoff_run / "decisions.parquet").to_pydict()
    steps = [json.loads(line) for line in (tradeoff_run / "steps.jsonl").read_text().splitlines()]
    assert len(table["position"]) == sum(step["decided_tokens"] for step in steps)
    first = [(r, p) for r, p in zip(table["request_id"], table["position"], strict=True) if p == 0]
    assert sorted(first) == [(str(i), 0) for i in range(4)]
    routes = {
        route for p, route in zip(table["position"], table["requested"], strict=True) if p < 16
    }
    assert routes == {"high"}


def test_the_reference_keeps_every_entry_as_it_is(tmp_path: Path) -> None:
    """A KL of exactly 0, because the run was compared with itself: what eviction costs is then invisible."""
    folder = run_in(tmp_path, "debug=tiny", "task=evaluate", "router=all_high", "kvcache=int8")
    metrics = json.loads((folder / "metrics.json").read_text())
    quality = metrics["quality"]
    assert quality["kl_mean_nats"] > 1e-6
    assert quality["kl_mean_nats"] != metrics["baselines"]["all_high"]["kl_mean_nats"]
