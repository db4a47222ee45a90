"""Guards the retention benchmark: keys that others read, peaks, sensitive tokens, and what a claim may rest on."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scripts.memory_bench import app
from scripts.memory_bench.documents import Document
from scripts.memory_bench.measures import (
    Reference,
    measure_reference,
    measure_setting,
    run_documents,
    windowed_top1,
)
from scripts.memory_bench.report import TITLE, claims, line
from scripts.memory_bench.settings import POLICIES, SCORED, SHIPPED, shipped_settings
from scripts.memory_bench.setup import Bench, build
from scripts.memory_bench.sizes import QUICK
from scripts.memory_bench.summary import Summary
from tokenrouter import LLM, EngineOptions
from tokenrouter.kvcache.retention import Full, Learned, RetentionOptions, SinkWindow
from tokenrouter.models import LoadedModel, tiny_random

SCHEDULE = RetentionOptions(policy=Full(), interval=64, window=16, layers=2)
CLAIMS = {
    "kv_saved_frac_at_1pct",
    "kv_ppl_rel_pct",
    "kv_sensitive_ppl_rel_pct",
    "kv_best",
    "kv_threshold_saved_frac_at_1pct",
    "kv_controls_saved_frac_at_1pct",
    "kv_by_budget",
    "kv_int8",
}
FACTS = {
    "documents",
    "tokens",
    "sensitive_tokens",
    "sensitive_frac",
    "sensitive_frac_by_source",
    "ppl_full",
    "peak_live_bytes_full",
    "retrieval",
}
QUALITY = {"kl_mean_nats", "ppl_rel_pct", "kl_sensitive_mean_nats", "sensitive_ppl_rel_pct"}


@pytest.fixture(scope="module", autouse=True)
def any_model() -> Iterator[None]:
    """The shipped policy is for the model that the script runs, and here a tiny one takes its place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learned, "use_for", lambda *_, **__: None)
        yield


@pytest.fixture(scope="module")
def bench() -> Bench:
    return build(tiny_random(), QUICK, data_dir=None, schedule=SCHEDULE)


@pytest.fixture(scope="module")
def reference(bench: Bench) -> Reference:
    return measure_reference(bench)


@pytest.fixture(scope="module")
def result(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(app.run(bench), allow_nan=False))
    return found


def test_every_key_that_others_read_is_there(result: dict[str, Any]) -> None:
    assert set(result) == CLAIMS | FACTS | {"schedule", "sizes", "quick", "rows"}
    assert result["quick"] and result["schedule"]["interval"] == 64
    assert list(dict.fromkeys(row["policy"] for row in result["rows"])) == list(POLICIES)
    for row in result["rows"]:
        by_source, by_document = row["sources"]["python_docs"], row["by_document"]
        for part in (row, row["prefill"], row["decode"], by_source, *by_document):
            assert set(part) >= QUALITY


def test_a_row_without_eviction_is_the_reference(result: dict[str, Any]) -> None:
    """Rows in another order than the reference's, or of another document, would show a KL here."""
    full = result["rows"][0]
    assert full["saved_frac"] == 0.0 and full["kl_mean_nats"] == pytest.approx(0.0, abs=1e-4)
    assert full["ppl_rel_pct"] == pytest.approx(0.0, abs=1e-3)
    evicting = [row for row in result["rows"] if row["policy"] in SCORED]
    assert evicting and all(row["kl_mean_nats"] > full["kl_mean_nats"] for row in evicting)


def test_int8_entries_alone_have_a_row(result: dict[str, Any]) -> None:
    """Rows that evict and compress looked good for what the compression alone does."""
    [row] = [row for row in result["rows"] if row["policy"] == "int8"]
    head_dim = tiny_random().config.head_dim
    bytes_frac = (head_dim + 4) / (4 * head_dim)
    assert row["saved_frac"] == pytest.approx(1 - bytes_frac, abs=1e-6)
    assert row["kl_mean_nats"] > 0.0
    assert result["kv_int8"]["kl_mean_mnat"] == pytest.approx(1e3 * row["kl_mean_nats"])
    assert result["kv_int8"]["kl_sensitive_mean_mnat"] == pytest.approx(
        1e3 * row["kl_sensitive_mean_nats"]
    )


def test_routes_keep_what_their_classes_say(result: dict[str, Any]) -> None:
    """A router with one route leaves the policy to choose by age alone, as sink_window does."""
    rows = {(row["policy"], row["strength"]): row for row in result["rows"]}
    route, window = rows["route", "50 %"], rows["sink_window", "50 %"]
    assert route["saved_frac"] == pytest.approx(window["saved_frac"], abs=1e-9)
    assert route["kl_mean_nats"] != pytest.approx(window["kl_mean_nats"], rel=1e-3)


def test_documents_have_their_own_change(bench: Bench, result: dict[str, Any]) -> None:
    """A mean that one document carries; quartiles of another number than the column shows."""
    for row in result["rows"]:
        changes = [found["ppl_rel_pct"] for found in row["by_document"]]
        low, _, mid, _, high = row["ppl_rel_pct_quartiles"]
        assert len(changes) == len(bench.documents) == 2
        assert (low, high) == (min(changes), max(changes)) and mid == pytest.approx(
            sum(changes) / 2
        )
        assert low <= row["ppl_rel_pct"] <= high
        kl = [found["kl_mean_nats"] for found in row["by_document"]]
        assert sum(kl) / 2 == pytest.approx(row["kl_mean_nats"])
        assert f"{low:.2f} .. {high:.2f}" in line(row)


def test_both_phases_and_their_tokens_make_the_whole(result: dict[str, Any]) -> None:
    """A prompt's last row counted as decode, or the forced tokens not at all."""
    share = QUICK.decode_tokens / QUICK.document_tokens
    for row in result["rows"]:
        whole = (1 - share) * row["prefill"]["kl_mean_nats"] + share * row["decode"]["kl_mean_nats"]
        assert whole == pytest.approx(row["kl_mean_nats"], rel=1e-6)


def test_rows_of_documents_that_run_together_are_told_apart(
    bench: Bench, reference: Reference
) -> None:
    """They come mixed, and in another order from the reference than from a setting with shorter chunks."""
    run = measure_setting(bench, bench.settings[-1], reference)
    found, scores = Summary(bench, reference).row(run), run.scores
    prompt_len = bench.documents[0].prompt_len
    decoded = scores.kl_nats[scores.position >= prompt_len].mean()
    assert found["decode"]["kl_mean_nats"] == pytest.approx(decoded)
    is_sensitive_DN = torch.stack(reference.is_sensitive_N).numpy()
    sensitive = scores.kl_nats[is_sensitive_DN[scores.window, scores.position]].mean()
    assert found["kl_sensitive_mean_nats"] == pytest.approx(sensitive)


def test_peaks_count_the_running_chunk(result: dict[str, Any]) -> None:
    """Counted after a step's evictions, every policy would save an interval more than it does."""
    rows = {(row["policy"], row["strength"]): row for row in result["rows"]}
    kept = (QUICK.document_tokens - SCHEDULE.interval) // 2  # at the last decision but one
    saved = 1 - (kept + SCHEDULE.interval) / QUICK.document_tokens
    assert rows["sink_window", "50 %"]["saved_frac"] == pytest.approx(saved, abs=1e-9)
    assert rows["sink_window", "to 192 r154"]["saved_frac"] == pytest.approx(0.5, abs=1e-9)
    for row in rows.values():
        assert row["engine_peak_live_bytes"] <= row["peak_live_bytes"]


def test_one_documents_peak_is_the_engines() -> None:
    """Two ways to count the same slots."""
    model = tiny_random()
    document = Document(source="one", ids=[5 + i % 200 for i in range(300)], prompt_len=250)
    retention = RetentionOptions(policy=SinkWindow(evicted_frac=0.5), interval=32, recent=8)
    llm = LLM(model, options=EngineOptions(retention=retention, num_kv_slots=512))
    rows = np.zeros(300, np.int64)

    def count(_: int, position: int, logits_TV: torch.Tensor) -> None:
        rows[position : position + len(logits_TV)] += 1

    peaks = run_documents(llm, [document], count)
    assert peaks == [llm.engine.stats.peak_live_bytes]
    assert 150 <= peaks[0] / llm.engine.kv_bytes_per_slot < 200
    assert (rows == 1).all()


def test_a_sensitive_tokens_reading_starts_afresh() -> None:
    """Evicting all but the window keeps what older tokens left in newer entries, and loses the attention sink."""
    llm = LLM(tiny_random(), options=EngineOptions(num_kv_slots=512))
    ids = [5 + 7 * i % 211 for i in range(120)]
    untouched_N = torch.full((120,), -7)
    found_N = windowed_top1(llm, ids, 32, 16, untouched_N)
    assert (found_N[:32] == -7).all()
    for position in (32, 40, 47, 48, 100, 119):
        first = position - (position - 32) % 16 - 31
        seen: dict[int, int] = {}

        def last(_: int, start: int, logits_TV: torch.Tensor, seen: dict[int, int] = seen) -> None:
            seen.update(enumerate(logits_TV.argmax(dim=-1).tolist(), start=start))

        llm.score([ids[first : position + 1]], sink=last)
        assert found_N[position] == seen[position - first], position


def test_sensitive_tokens_are_those_that_change(reference: Reference) -> None:
    """Within the first ``visible_tokens`` nothing is left out, so nothing may change."""
    for is_sensitive_N in reference.is_sensitive_N:
        assert not is_sensitive_N[: QUICK.visible_tokens].any()
        assert is_sensitive_N[QUICK.visible_tokens :].any()


def row(policy: str, saved: float, ppl: float, sensitive: float | None, **more: Any) -> Any:
    found = {"policy": policy, "saved_frac": saved, "ppl_rel_pct": ppl, "strength": "50 %"}
    found |= {"sensitive_ppl_rel_pct": sensitive, "evicted_frac": 0.5}
    return found | {"kl_sensitive_mean_nats": 1.0, "kl_mean_nats": 0.25} | more


def test_a_claim_keeps_both_limits_and_is_no_controls() -> None:
    """A window looks perfect on the tokens that do not need their context: one limit would let it win."""
    rows = [
        row("int8", 0.9, 0.1, 0.1, strength="", evicted_frac=None),
        row("sink_window", 0.8, 0.1, 1.0, kl_sensitive_mean_nats=0.3),
        row("key_norm", 0.7, 0.9, 3.1),
        row("heavy_hitter", 0.6, 1.1, 0.0, kl_sensitive_mean_nats=0.4),
        row("observation_window", 0.5, 0.9, 2.9, kl_sensitive_mean_nats=0.5),
        row("threshold", 0.3, -0.2, None, evicted_frac=None),
    ]
    found = claims(rows)
    assert found["kv_best"] == "observation_window 50 %" and found["kv_saved_frac_at_1pct"] == 0.5
    assert found["kv_sensitive_ppl_rel_pct"] == 2.9
    assert found["kv_threshold_saved_frac_at_1pct"] == 0.3
    assert found["kv_controls_saved_frac_at_1pct"] == {
        "int8": 0.9,
        "sink_window": 0.8,
    }
    assert list(found["kv_by_budget"]["50 %"]) == ["heavy_hitter", "sink_window"]
    assert found["kv_by_budget"]["50 %"]["heavy_hitter"]["kl_mean_nats"] == 0.25
    assert found["kv_int8"]["kl_mean_mnat"] == 250.0
    without = claims(rows[2:4])
    assert without["kv_saved_frac_at_1pct"] is None and without["kv_int8"] is None


def test_a_line_is_as_wide_as_the_title(result: dict[str, Any]) -> None:
    assert {len(line(found)) for found in result["rows"]} == {len(TITLE)}


def tiny(name: str, *, dtype: str) -> LoadedModel:
    assert name == app.MODEL
    return tiny_random(
        dtype=dtype, num_hidden_layers=5
    )  # a layer for each group of kvcache=learned


def test_only_the_shipped_configs_and_their_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Numbers of the script's own tuning under the name of a config; a file that nobody can place."""
    given = ["--quick", "--only-shipped", "--items", "0", "--documents", "1", "--start", "1"]
    path = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["bench_memory.py", *given, "--json", str(path)])
    monkeypatch.delenv("TOKENROUTER_DATA_DIR", raising=False)
    monkeypatch.setattr(app, "load_model", tiny)
    app.main("")
    found = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    names = [setting.policy for setting in shipped_settings()]
    assert [row["policy"] for row in found["rows"]] == names
    assert {row["strength"] for row in found["rows"]} == {SHIPPED} and found["schedule"] is None
    assert {row["policy"] for row in found["rows"] if row["recent"] is None} == {"full", "int8"}
    assert found["arguments"]["start"] == found["sizes"]["start"] == 1
    assert found["arguments"]["only_shipped"] and "commit" in found["provenance"]
    assert found["provenance"]["hardware"]["cpu"] and found["retrieval"] == {}
