"""Guards the retention benchmark: keys that others read, peaks, sensitive tokens, and what a claim may rest on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scripts.memory_bench import app
from scripts.memory_bench.documents import Document, load_documents
from scripts.memory_bench.measures import (
    measure_reference,
    measure_setting,
    run_documents,
    windowed_top1,
)
from scripts.memory_bench.retrieval import WORDS, copy_item, key_value_item, solved
from scripts.memory_bench.setup import POLICIES, QUICK, SCORED, Bench, Sizes, build, make_settings
from scripts.memory_bench.summary import TITLE, Summary, claims, line
from tokenrouter import LLM, EngineOptions
from tokenrouter.kvcache.retention import Full, RetentionOptions, SinkWindow
from tokenrouter.models import tiny_random
from tokenrouter.models.tiny import ByteTokenizer

SCHEDULE = RetentionOptions(policy=Full(), interval=64, window=16, layers=2)
CLAIMS = {
    "kv_saved_frac_at_1pct",
    "kv_ppl_rel_pct",
    "kv_sensitive_ppl_rel_pct",
    "kv_best",
    "kv_threshold_saved_frac_at_1pct",
    "kv_controls_saved_frac_at_1pct",
    "kv_by_budget",
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


@pytest.fixture(scope="module")
def bench() -> Bench:
    return build(tiny_random(), QUICK, data_dir=None, schedule=SCHEDULE)


@pytest.fixture(scope="module")
def result(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(app.run(bench), allow_nan=False))
    return found


def encode(text: str) -> list[int]:
    return ByteTokenizer().encode(text)


def test_every_key_that_others_read_is_there(result: dict[str, Any]) -> None:
    assert set(result) == CLAIMS | FACTS | {"schedule", "sizes", "quick", "rows"}
    assert result["quick"] and result["schedule"]["interval"] == 64
    assert list(dict.fromkeys(row["policy"] for row in result["rows"])) == list(POLICIES)
    for row in result["rows"]:
        for part in (row, row["prefill"], row["decode"], row["sources"]["python_docs"]):
            assert set(part) >= QUALITY


def test_a_row_without_eviction_is_the_reference(result: dict[str, Any]) -> None:
    """Rows in another order than the reference's, or of another document, would show a KL here."""
    full = result["rows"][0]
    assert full["saved_frac"] == 0.0 and full["kl_mean_nats"] == pytest.approx(0.0, abs=1e-4)
    assert full["ppl_rel_pct"] == pytest.approx(0.0, abs=1e-3)
    evicting = [row for row in result["rows"] if row["policy"] in SCORED]
    assert evicting and all(row["kl_mean_nats"] > full["kl_mean_nats"] for row in evicting)


def test_both_phases_and_their_tokens_make_the_whole(result: dict[str, Any]) -> None:
    """A prompt's last row counted as decode, or the forced tokens not at all."""
    share = QUICK.decode_tokens / QUICK.document_tokens
    for row in result["rows"]:
        whole = (1 - share) * row["prefill"]["kl_mean_nats"] + share * row["decode"]["kl_mean_nats"]
        assert whole == pytest.approx(row["kl_mean_nats"], rel=1e-6)


def test_rows_of_documents_that_run_together_are_told_apart(bench: Bench) -> None:
    """They come mixed, and in another order from the reference than from a setting with shorter chunks."""
    run = measure_setting(bench, bench.settings[-1], reference := measure_reference(bench))
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


def test_sensitive_tokens_are_those_that_change(bench: Bench) -> None:
    """Within the first ``visible_tokens`` nothing is left out, so nothing may change."""
    reference = measure_reference(bench)
    for is_sensitive_N in reference.is_sensitive_N:
        assert not is_sensitive_N[: QUICK.visible_tokens].any()
        assert is_sensitive_N[QUICK.visible_tokens :].any()


def test_answers_stand_where_they_are_asked_for() -> None:
    """A question's own tokens counted as an answer, or an answer that is not in the context."""
    filler = encode("nothing of it here. ")
    copied = copy_item(encode, filler, 3)
    text = ByteTokenizer().decode(copied.ids)
    words = text.split(":")[1].split("nothing")[0].split()
    answers = [ByteTokenizer().decode(copied.ids[a:b]).strip() for a, b in copied.answers]
    assert len(words) == 48 and words[8:] == answers
    assert copied.answers[0][0] == copied.prompt_len and copied.answers[-1][1] == len(copied.ids)

    asked = key_value_item(encode, filler, 3)
    lines = ByteTokenizer().decode(asked.ids).split("nothing")[0].strip().split("\n")[1:]
    pairs = dict(found.split(": ") for found in lines)
    assert len(pairs) == 30 and asked.answers[0][0] == asked.prompt_len
    for start, stop in asked.answers:
        key = ByteTokenizer().decode(asked.ids[:start]).rstrip(":").rsplit("\n", 1)[1]
        assert ByteTokenizer().decode(asked.ids[start:stop]).strip() == pairs[key]


def test_words_differ() -> None:
    """A word that occurs twice would give a key two values."""
    assert len(set(WORDS)) == len(WORDS) >= 60


def test_an_answer_needs_all_of_its_tokens() -> None:
    item = copy_item(encode, encode("filler"), 0)
    right = [True] * len(item.ids)
    right[item.answers[2][1] - 1] = False
    assert [i for i, found in enumerate(solved(item, right)) if not found] == [2]


def test_accuracy_counts_what_the_full_cache_solves(bench: Bench) -> None:
    """Answers that the full cache misses counted as a policy's failures."""
    reference = measure_reference(bench)
    for answers in reference.solved:
        answers[:] = [index < 4 for index in range(len(answers))]
    run = measure_setting(bench, bench.settings[-1], reference)
    assert run.solved is not None
    for answers in run.solved:
        answers[:] = [index in (0, 7) for index in range(len(answers))]
    summary = Summary(bench, reference)
    assert summary.row(run)["retrieval"] == {"copy": 0.25, "key_value": 0.25}
    assert summary.facts()["retrieval"]["copy"] == {"answers": 40, "solved_by_full": 4}
    for answers in reference.solved:
        answers[:] = [False] * len(answers)
    assert Summary(bench, reference).row(run)["retrieval_acc_frac"] is None


def test_items_that_lose_nothing_are_no_test(bench: Bench, result: dict[str, Any]) -> None:
    """Perfect retrieval by a budget that is larger than the items."""
    assert result["rows"][0]["policy"] == "full"
    assert result["rows"][0]["retrieval"] == {"copy": None, "key_value": None}
    reference = measure_reference(bench)
    roomy = make_settings(SCHEDULE, Sizes(evicted_fracs=(), fixed_fracs=(0.1,)), ("sink_window",))[
        0
    ]
    assert roomy.strength == "to 3622 r2898"
    assert measure_setting(bench, roomy, reference).solved is None
    assert measure_setting(bench, bench.settings[-1], reference).solved is not None


def row(policy: str, saved: float, ppl: float, sensitive: float | None, **more: Any) -> Any:
    found = {"policy": policy, "saved_frac": saved, "ppl_rel_pct": ppl, "strength": "50 %"}
    found |= {"sensitive_ppl_rel_pct": sensitive, "evicted_frac": 0.5, "retrieval_acc_frac": 0.0}
    return found | {"kl_sensitive_mean_nats": 1.0} | more


def test_a_claim_keeps_both_limits_and_is_no_controls() -> None:
    """A window looks perfect on the tokens that do not need their context: one limit would let it win."""
    rows = [
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
    assert found["kv_controls_saved_frac_at_1pct"] == {"sink_window": 0.8}
    assert list(found["kv_by_budget"]["50 %"]) == ["heavy_hitter", "sink_window"]
    assert claims(rows[1:3])["kv_saved_frac_at_1pct"] is None


def test_settings_differ_in_strength_and_share_the_schedule() -> None:
    """Ratios for a policy without a budget; a fixed budget without room for the running chunk."""
    sizes = Sizes(evicted_fracs=(0.25,), fixed_fracs=(0.25, 0.75), thresholds=(0.1,))
    settings = make_settings(SCHEDULE, sizes, ("threshold", "random"))
    assert [s.strength for s in settings] == [
        *("< 0.1 r1536", "25 %", "to 3008 r2406", "to 960 r768", "to 3008 int8")
    ]
    assert [s.retention.recent for s in settings] == [1536, 32, 2406, 768, 32]
    assert [s.retention.compress for s in settings] == [None, None, None, None, "old"]
    assert {s.retention.interval for s in settings} == {64}
    budgets = [getattr(s.retention.policy, "evicted_frac", None) for s in settings]
    assert budgets == [None, 0.25, 0.0, 0.0, 0.0]


def test_a_line_is_as_wide_as_the_title(result: dict[str, Any]) -> None:
    assert {len(line(found)) for found in result["rows"]} == {len(TITLE)}


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    for name in ("wiki_articles", "arxiv_latex", "mt_bench_101"):
        (tmp_path / name).mkdir()
    (tmp_path / "wiki_articles" / "a.txt").write_text("short\n" + "w" * 99 + "\n" + "x" * 99)
    papers = [json.dumps({"text": letter * 99}) for letter in "pq"]
    (tmp_path / "arxiv_latex" / "a.jsonl").write_text("\n".join(papers))
    turns = [[{"user": "hi", "bot": letter * count}] for letter, count in (("s", 40), ("t", 60))]
    talks = [json.dumps({"history": history}) for history in turns]
    (tmp_path / "mt_bench_101" / "a.jsonl").write_text("\n".join(talks))
    return tmp_path


def load(data_dir: Path, documents: int) -> list[Document]:
    return load_documents(
        ByteTokenizer(),
        str(data_dir),
        document_tokens=80,
        decode_tokens=10,
        documents=documents,
        dialogues=1,
    )


def test_documents_are_long_enough_and_dialogues_the_longest(sets: Path) -> None:
    """A document shorter than asked for would weigh less, and its prompt could be empty."""
    found = load(sets, 1)
    assert [d.source for d in found] == ["wiki_articles", "arxiv_latex", "mt_bench_101"]
    texts = [ByteTokenizer().decode(d.ids) for d in found]
    assert texts[:2] == ["w" * 80, "p" * 80] and texts[2].startswith("user: hi\nassistant: ttt")
    assert [len(d.ids) - d.prompt_len for d in found] == [10, 10, 10]


def test_too_few_documents_are_refused(sets: Path) -> None:
    with pytest.raises(ValueError, match="wiki_articles has 2 documents of 80 tokens, and 3 are"):
        load(sets, 3)


def test_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--policies", "full", "random", "--interval", "32", "--documents", "2"]
    monkeypatch.setattr("sys.argv", ["bench_memory.py", *given])
    monkeypatch.setenv("TOKENROUTER_DATA_DIR", "sets")
    chosen = app.parse_arguments("")
    assert (chosen.policies, chosen.interval, chosen.documents) == (["full", "random"], 32, 2)
    assert (chosen.recent, chosen.data_dir, chosen.quick) == (32, "sets", False)
