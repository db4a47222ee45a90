"""Guards retrieval in the memory benchmark: what is asked, when the eviction comes, and what beats a control."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from scripts.memory_bench.recall import beats_controls, recall_rows, reference_facts, run_items
from scripts.memory_bench.report import RECALL_TITLE, recall_line
from scripts.memory_bench.setup import Bench, build
from scripts.memory_bench.sizes import QUICK
from tokenrouter import LLM, EngineOptions
from tokenrouter.evaluation.retrieval.items import Item, make_items
from tokenrouter.kvcache.retention import Full, RetentionOptions, SinkWindow
from tokenrouter.models import tiny_random

SCHEDULE = RetentionOptions(policy=Full(), interval=128, window=128, layers=4)
POLICIES = ("full", "int8", "observation_window", "threshold", "random", "sink_window")


@pytest.fixture(scope="module")
def bench() -> Bench:
    sizes = replace(QUICK, documents=0, dialogues=0)
    return build(tiny_random(), sizes, data_dir=None, schedule=SCHEDULE, policies=POLICIES)


@pytest.fixture(scope="module")
def rows(bench: Bench) -> list[dict[str, Any]]:
    return list(recall_rows(bench))


def text_of(ids: Sequence[int]) -> str:
    tokenizer = tiny_random().tokenizer
    return str(tokenizer.decode(ids))


def test_an_item_holds_its_answer_once_and_asks_for_it_at_the_end(bench: Bench) -> None:
    """A question that no context answers, or one that gives its answer away."""
    for item in bench.items:
        context, question = (
            item.ids[: item.question_at],
            item.ids[item.question_at : item.prompt_len],
        )
        behind = text_of(item.ids[item.prompt_len :])
        assert item.prompt_len == QUICK.context_tokens + QUICK.question_tokens
        assert QUICK.context_tokens <= item.question_at < item.prompt_len
        if item.task == "key_value":
            key = text_of(question).splitlines()[-1]
            [line] = [
                found for found in text_of(context).splitlines() if found.startswith(f"{key}:")
            ]
            assert f"{key}{behind}" == line
        else:
            assert f"{text_of(question)}{behind}" in text_of(context)
        assert behind.strip(": ") not in text_of(question)


def test_an_answer_is_predicted_after_the_decision(bench: Bench) -> None:
    """Logits of the question's last token come before its eviction: they would always be the full cache's."""
    for item in bench.items:
        assert all(answer - 1 >= item.prompt_len for answer in item.answers)
        assert all(item.ids[answer] in item.choices for answer in item.answers)
        assert item.chance_frac == 1 / len(set(item.choices))


def test_items_need_room() -> None:
    tokenizer = tiny_random().tokenizer
    with pytest.raises(ValueError, match=r"copy lacks \d+ tokens of 50 and 96"):
        make_items(tokenizer.encode, list(range(400)), 1, context=50, question=96)


def test_an_answer_is_chosen_among_its_choices() -> None:
    """Exact prediction counted what the model would rather say than any of the choices."""
    llm = LLM(tiny_random(), options=EngineOptions(num_kv_slots=512))
    ids = [5 + 7 * i % 211 for i in range(40)]
    logits: dict[int, torch.Tensor] = {}

    def keep(_: int, start: int, logits_TV: torch.Tensor) -> None:
        logits.update(enumerate(logits_TV, start=start))

    llm.score([ids], sink=keep)
    order = logits[34].argsort(descending=True).tolist()
    for target, is_right in ((order[3], 1.0), (order[9], 0.0)):
        own = [*ids[:35], target, *ids[36:]]
        item = Item(
            task="copy",
            ids=own,
            question_at=20,
            prompt_len=30,
            answer_at=35,
            answers=(35,),
            choices=(order[3], order[9]),
        )
        assert run_items(llm, [item])["copy"].tolist() == [is_right]
        alone = item.without_context()
        assert alone.ids == own[20:] and alone.ids[alone.answers[0]] == target
        assert (alone.prompt_len, alone.answer_at) == (10, 15)


def test_the_full_cache_and_chance_are_stated(bench: Bench) -> None:
    facts = reference_facts(bench)
    assert facts["copy"]["items"] == facts["key_value"]["items"] == QUICK.items
    assert facts["copy"]["answers"] == 8 * QUICK.items
    for task in facts.values():
        assert 0 < task["chance_frac"] < 1 and 0 <= task["without_context_frac"] <= 1
        assert task["full_acc_frac"]["low"] <= task["full_acc_frac"]["value"]


def test_the_one_decision_comes_before_or_after_the_question(
    bench: Bench, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both rows at the schedule's own interval; a window longer than it refused, or shares of another length."""
    assert [row["decision"] for row in rows] == ["before"] * 4 + ["after"] * 4
    assert [row["policy"] for row in rows[:2]] == ["random", "sink_window"]
    for row in rows:
        if row["policy"] != "threshold":
            assert row["evicted_frac"] == pytest.approx(0.5, abs=0.01)
        assert len(recall_line(row)) == len(RECALL_TITLE)
    seen: list[int] = []

    def keep(policy: SinkWindow, entries: Any, is_guarded_N: torch.Tensor) -> torch.Tensor:
        seen.append(entries.num_seen)
        return torch.ones(len(entries), dtype=torch.bool)

    monkeypatch.setattr(SinkWindow, "keep", keep)
    only = [s for s in bench.retrieval_settings if s.policy == "sink_window"]
    list(recall_rows(replace(bench, retrieval_settings=only)))
    first, second = QUICK.context_tokens, bench.items[0].prompt_len
    assert seen == [first] * len(bench.items) + [second] * len(bench.items)


def test_a_gain_is_over_the_controls_of_the_same_share(rows: list[dict[str, Any]]) -> None:
    """A threshold evicts another share: against a control it would be judged by how little it evicts."""
    both = {"random", "sink_window"}
    for row in rows:
        compared = both if row["policy"] == "observation_window" else set()
        assert all(set(scores["minus"]) == compared for scores in row["tasks"].values())
    [own, other] = [
        row["tasks"]["copy"]
        for row in rows
        if row["decision"] == "after" and row["policy"] in ("observation_window", "random")
    ][::-1]
    gain = own["acc_frac"]["value"] - other["acc_frac"]["value"]
    assert own["minus"]["random"]["value"] == pytest.approx(gain)


def test_a_gain_inside_the_interval_beats_nobody() -> None:
    def row(policy: str, *lows: float) -> dict[str, Any]:
        names = ("random", "sink_window")
        minus = {name: {"low": low} for name, low in zip(names, lows, strict=False)}
        scores = {"minus": minus}
        return {
            "policy": policy,
            "strength": "50 %",
            "decision": "after",
            "tasks": {"copy": scores},
        }

    rows = [
        row("heavy_hitter", 0.1, 0.2),
        row("key_norm", 0.1, -0.1),
        row("threshold"),
        row("sink_window"),
    ]
    assert beats_controls(rows) == {"after": {"copy": ["heavy_hitter 50 %"]}}


def test_items_are_observed_by_about_a_question(bench: Bench) -> None:
    """The documents' window of 128 queries, in which a question of 20 drowns."""
    windows = {
        s.policy: s.retention.window for s in bench.retrieval_settings if s.retention is not None
    }
    assert windows["observation_window"] == QUICK.question_window == 16
    assert "full" not in windows and "int8" not in windows
