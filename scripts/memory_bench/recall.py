"""How many answers of the retrieval items each setting still finds, when it evicts before or after the question.

I items of a task.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokenrouter import LLM
from tokenrouter.evaluation.retrieval.items import Item
from tokenrouter.evaluation.router_scores import Bootstrap, difference, mean

from .forced import finish, force
from .settings import RECALL_CONTROLS, Setting
from .setup import Bench

Row = dict[str, Any]
Found = dict[str, Tensor]
"""By task, per item the share of its answers that are found, float32 ``[I]``."""
BEFORE, AFTER = "before", "after"


def reference_facts(bench: Bench) -> Row:
    """By task what it asks, and how it is answered from the full cache and without a context."""
    llm = bench.llm(None)
    found = run_items(llm, bench.items)
    blind = run_items(llm, [item.without_context() for item in bench.items])
    facts = {}
    for task, acc_I in found.items():
        items = [item for item in bench.items if item.task == task]
        facts[task] = {
            "items": len(items),
            "answers": sum(len(item.answers) for item in items),
            "chance_frac": sum(item.chance_frac for item in items) / len(items),
            "without_context_frac": float(blind[task].mean()),
            "full_acc_frac": Bootstrap(len(items)).interval(mean, acc_I)._asdict(),
        }
    return facts


def recall_rows(bench: Bench) -> Iterator[Row]:
    """A row per setting and decision, the controls of a decision first, since others are compared with them."""
    points = {BEFORE: bench.sizes.context_tokens, AFTER: bench.items[0].prompt_len}
    settings = sorted(bench.retrieval_settings, key=lambda s: s.policy not in RECALL_CONTROLS)
    for decision, num_seen in points.items():
        controls: dict[tuple[str, float | None], Found] = {}
        for setting in settings:
            llm = bench.llm(_decided_at(setting, num_seen))
            found = run_items(llm, bench.items)
            key = setting.policy, setting.evicted_frac
            if setting.policy in RECALL_CONTROLS:
                controls[key] = found
            seen = num_seen * len(bench.items) * len(llm.engine.pool.tables)
            yield {
                "policy": setting.policy,
                "strength": setting.strength,
                "decision": decision,
                "evicted_frac": llm.engine.stats.evicted_entries / seen,
                "tasks": {
                    task: _scores(acc_I, _controls_of(setting, controls, task))
                    for task, acc_I in found.items()
                },
            }


def beats_controls(rows: Sequence[Row]) -> dict[str, dict[str, list[str]]]:
    """By decision and task the settings that find more than each control that evicts the same, outside the interval."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        for task, scores in row["tasks"].items():
            names = found.setdefault(row["decision"], {}).setdefault(task, [])
            if scores["minus"] and all(gain["low"] > 0 for gain in scores["minus"].values()):
                names.append(f"{row['policy']} {row['strength']}")
    return found


def run_items(llm: LLM, items: Sequence[Item]) -> Found:
    """All items at once: an answer is found where its token has the largest logit among the item's choices."""
    right = [0] * len(items)

    def look(index: int, position: int, logits_TV: Tensor) -> None:
        item = items[index]
        choices_C = torch.tensor(item.choices)
        for answer in item.answers:
            row = answer - 1 - position
            if 0 <= row < len(logits_TV):
                best = choices_C[logits_TV[row, choices_C].argmax()]
                right[index] += int(best) == item.ids[answer]

    for index, item in enumerate(items):
        force(llm, index, item.ids, item.prompt_len, look, wants_all=False)
    finish(llm.engine)
    shares: dict[str, list[float]] = {}
    for item, count in zip(items, right, strict=True):
        shares.setdefault(item.task, []).append(count / len(item.answers))
    return {task: torch.tensor(values) for task, values in shares.items()}


def _decided_at(setting: Setting, num_seen: int) -> Setting:
    """The one decision falls there; what else the setting says stays, a longer window aside."""
    retention = setting.retention
    assert retention is not None, "an item is read with settings that evict"
    window = min(retention.window, num_seen)
    return replace(setting, retention=replace(retention, interval=num_seen, window=window))


def _controls_of(
    setting: Setting, controls: dict[tuple[str, float | None], Found], task: str
) -> dict[str, Tensor]:
    return {
        policy: found[task]
        for (policy, evicted_frac), found in controls.items()
        if evicted_frac is not None
        and evicted_frac == setting.evicted_frac
        and setting.policy not in RECALL_CONTROLS
    }


def _scores(acc_I: Tensor, controls: dict[str, Tensor]) -> Row:
    """Accuracy, and by control what it lies above it; items are drawn together."""
    bootstrap = Bootstrap(len(acc_I))
    return {
        "acc_frac": bootstrap.interval(mean, acc_I)._asdict(),
        "minus": {
            policy: bootstrap.interval(difference, acc_I, other_I)._asdict()
            for policy, other_I in controls.items()
        },
    }
