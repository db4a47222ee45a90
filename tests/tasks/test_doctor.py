"""Guards task=doctor: a trouble that is not named or a healthy run that is called ill."""

import json
import re
from pathlib import Path

import pytest

from tests.tasks.jobs import run_in
from tests.tasks.run_folders import PROVENANCE, STATUS, Patch, make_run
from tokenrouter.tasks import build
from tokenrouter.tasks.doctor import examine
from tokenrouter.tasks.doctor_rules import RULES
from tokenrouter.tasks.doctor_run import read_run

RETAINS = {"kvcache.retention": {"interval": 128}}
EVICTED = {"kv.evicted_tokens": 660.0, "kv.saved_frac": 0.4, "kv.compactions": 1}

# rule, what is changed in a healthy run (config, metrics, other files), level, a part of what was seen
CASES: tuple[tuple[str, Patch, Patch, Patch, str, str], ...] = (
    (
        "run_failed",
        {},
        {},
        {"status": STATUS | {"status": "failed", "error": "ValueError: no pool"}},
        "serious",
        "ValueError: no pool",
    ),
    (
        "run_unfinished",
        {},
        {},
        {"status": STATUS | {"status": "running"}},
        "serious",
        "started at 2026-01-01",
    ),
    (
        "files_damaged",
        {},
        {},
        {"raw": {"steps.jsonl": '{"num'}},
        "serious",
        "steps.jsonl: 1 of 1 lines are no JSON objects, the first is line 1",
    ),
    ("files_missing", {}, {}, {"raw": {"steps.jsonl": None}}, "serious", "no steps.jsonl"),
    ("router_too_heavy", {}, {"router.overhead_frac": 0.06}, {}, "warning", "6.0%, 3.0 us per"),
    ("router_too_heavy", {}, {"router.overhead_frac": 0.11}, {}, "serious", "overhead_frac 11.0%"),
    ("cache_cold", {}, {"router.cache_hit_frac": 0.39}, {}, "warning", "cache_hit_frac 39.0%"),
    (
        "prefixes_cold",
        {"kvcache.prefix_sharing": True},
        {"kv.shared_tokens": 0},
        {},
        "warning",
        "kv.shared_tokens 0",
    ),
    (
        "threshold_never_met",
        {},
        {"routes.high.decode_token_frac": 0.0, "routes.low.decode_token_frac": 1.0},
        {},
        "warning",
        "routes.high.decode_token_frac 0",
    ),
    (
        "threshold_never_met",
        {},
        {
            "quality.routes.high.prefill_token_frac": 1.0,
            "quality.routes.low.prefill_token_frac": 0.0,
        },
        {},
        "warning",
        "quality.routes.high.prefill_token_frac 1",
    ),
    ("tokens_degraded", {}, {"routes.low.degraded_frac": 1.0}, {}, "warning", "low.degraded_frac"),
    ("retention_never_evicts", RETAINS, {}, {}, "warning", "kvcache.retention.interval=128"),
    (
        "retention_saves_nothing",
        RETAINS,
        EVICTED | {"kv.saved_frac": 0.01},
        {},
        "warning",
        "kv.evicted_tokens 660, kv.saved_frac 1.0%",
    ),
    (
        "freed_not_returned",
        RETAINS,
        EVICTED | {"kv.compactions": 0},
        {},
        "note",
        "20.0 MB live, 30.0 MB allocated",
    ),
    (
        "many_preemptions",
        {},
        {"kv.preemption.recomputed_tokens": 1234},
        {"steps": [{"num_preemptions": 2}, {"num_preemptions": 4}]},
        "warning",
        "6 preemptions in the last pass of 60 requests; 1,234 tokens of a pass ran again",
    ),
    (
        "queued_waits",
        {"scheduler.dispatch": "queued"},
        {},
        {},
        "warning",
        "latency.queue_ms.mean 200.0 of latency.e2e_ms.mean 900.0 (22%; ",
    ),
    (
        "uniform_lengths",
        {},
        {"baselines.static_batch.output_tok_s": 97.0},
        {},
        "note",
        "static_batch.output_tok_s 97.0, ",
    ),
    (
        "too_few_requests",
        {},
        {"throughput.workload.num_requests": 49},
        {},
        "note",
        "98 requests in all passes (49 different)",
    ),
    ("commit_unknown", {}, {}, {"provenance": PROVENANCE | {"dirty": True}}, "note", "01234567"),
    ("commit_unknown", {}, {}, {"provenance": {"commit": None}}, "note", "no commit"),
)


@pytest.mark.parametrize(("rule", "config", "metrics", "files", "level", "seen"), CASES)
def test_a_trouble_is_named_and_nothing_else(
    tmp_path: Path, rule: str, config: Patch, metrics: Patch, files: Patch, level: str, seen: str
) -> None:
    [finding] = examine(read_run(make_run(tmp_path, config, metrics, files)))
    assert (finding.rule, finding.level) == (rule, level)
    assert seen in finding.seen


def test_every_rule_has_a_case() -> None:
    assert {case[0] for case in CASES} == {rule.name for rule in RULES}


@pytest.mark.parametrize(
    ("config", "metrics"),
    [
        ({}, {}),
        (RETAINS, EVICTED),
        (RETAINS, {"kv.int8_tokens": 9}),
        ({"scheduler.dispatch": "queued"}, {"latency.queue_ms.mean": 90.0}),
        (
            {"router._target_": "tokenrouter.routers.all_low.AllLowRouter"},
            {"routes.high.decode_token_frac": 0.0, "routes.low.decode_token_frac": 1.0},
        ),
        ({}, {"routes.high.decode_token_frac": 0.0, "routes.low.decode_token_frac": 0.0}),
        ({}, {"router.cache_hit_frac": 0.4}),
    ],
)
def test_a_healthy_run_is_called_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: Patch, metrics: Patch
) -> None:
    """All_low blamed for sending no token high; a compressing policy for evicting nothing; no decode for no decode."""
    path = make_run(tmp_path / "run", config, metrics, {})
    run_in(tmp_path / "doctor", "task=doctor", "logger=none", f"run={path}")
    assert f"Healthy: none of {len(RULES)} rules applies." in capsys.readouterr().out


def test_findings_are_printed_the_worst_first_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Notes above an error; a model loaded to read a few files."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(build, "load", load)
    troubles = {"baselines.static_batch.output_tok_s": 99.0, "router.overhead_frac": 0.2}
    path = make_run(tmp_path / "run", {}, troubles | {"router.cache_hit_frac": 0.1}, {})
    run_in(tmp_path / "doctor", "task=doctor", "logger=none", f"run={path}")
    kept = json.loads((tmp_path / "doctor" / "doctor.json").read_text())
    names = ["router_too_heavy", "cache_cold", "uniform_lengths"]
    assert [finding["rule"] for finding in kept["findings"]] == names
    out = capsys.readouterr().out
    assert re.findall(r"^(?:serious|warning|note): (\w+)$", out, flags=re.MULTILINE) == names
    assert "cure: Decide once per request (`router=request_level`)" in out and "Healthy" not in out


def test_a_real_run_is_examined_by_its_own_numbers(tradeoff_run: Path) -> None:
    """Names of keys that no run writes."""
    findings = {finding.rule: finding for finding in examine(read_run(tradeoff_run))}
    metrics = json.loads((tradeoff_run / "metrics.json").read_text())
    assert findings["too_few_requests"].seen.startswith("4 requests in all passes")
    assert not {"run_failed", "run_unfinished", "tokens_degraded"} & set(findings)
    overhead = metrics["router"]["overhead_frac"]
    assert ("router_too_heavy" in findings) == (overhead > 0.05)
    dirty = json.loads((tradeoff_run / "provenance.json").read_text())["dirty"]
    assert ("commit_unknown" in findings) == (dirty is not False)


def test_real_runs_with_troubles_show_them(tmp_path: Path) -> None:
    """Config keys or values that a rule looks for and no run has."""
    quiet = ("debug=tiny", "task=benchmark")
    options = (
        "router=all_low",
        "executor=full",
        "kvcache=sink_window",
        "kvcache.num_slots=125",
        "workload.prompt_lengths=[40,40,40]",
        "workload.output_min=12",
    )
    with pytest.warns(UserWarning, match="whose executor the pool does not have"):
        run_in(tmp_path / "run", *quiet, *options)
    found = {finding.rule for finding in examine(read_run(tmp_path / "run"))}
    assert {"tokens_degraded", "retention_never_evicts", "many_preemptions"} <= found


def test_a_real_failure_is_named(tmp_path: Path) -> None:
    """A run that failed before it wrote a config or metrics could not be read."""
    with pytest.raises(ValueError, match="hi_frac"):
        run_in(tmp_path, "debug=tiny", "+router.hi_frac=0.3")
    [finding] = examine(read_run(tmp_path))
    assert finding.rule == "run_failed" and "router.hi_frac is no option" in finding.seen
