"""Everything that is built before anything is measured: what is read, and what is compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tokenrouter import LLM, EngineOptions
from tokenrouter.executors import build_pool
from tokenrouter.kvcache.retention import (
    Full,
    HeavyHitter,
    KeyNorm,
    ObservationWindow,
    Random,
    RetentionOptions,
    RetentionPolicy,
    ScoredPolicy,
    SinkWindow,
    Threshold,
)
from tokenrouter.models import LoadedModel
from tokenrouter.workloads import PythonDocs

from .documents import Document, load_documents
from .retrieval import Item, copy_item, key_value_item

SCORED: dict[str, type[ScoredPolicy]] = {
    policy.name: policy for policy in (HeavyHitter, ObservationWindow, KeyNorm, SinkWindow, Random)
}
CONTROLS = ("full", "sink_window", "random")
POLICIES = ("full", "threshold", *SCORED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is run.

    Attributes:
        documents: of each set.
        decode_tokens: a document's last tokens, fed one by one.
        items: of each retrieval task.
        visible_tokens: what the model still reads of a context-sensitive token's context.
        shared_tokens: so many tokens share one such reading; its last one sees that many more.
        evicted_fracs: of the tokens seen, for policies with a budget.
        fixed_fracs: of the peak of a document of ``document_tokens``: by a fixed budget, which evicts nothing before.
        int8_policies: these run their largest fixed budget again with old entries in int8.
        recent_frac: share of a fixed budget that goes to the last tokens; the policy chooses the others.
        guarded_recent: thresholds run with so many last tokens guarded.
        thresholds: for ``threshold``, relative.
    """

    document_tokens: int = 4096
    decode_tokens: int = 256
    documents: int = 1
    dialogues: int = 1
    items: int = 2
    filler_tokens: int = 1000
    visible_tokens: int = 256
    shared_tokens: int = 128
    evicted_fracs: tuple[float, ...] = (0.25, 0.5, 0.75, 0.875)
    fixed_fracs: tuple[float, ...] = (0.5, 0.75)
    int8_policies: tuple[str, ...] = ("heavy_hitter", "sink_window", "random")
    thresholds: tuple[float, ...] = (0.4, 0.6, 0.8)
    recent_frac: float = 0.8
    guarded_recent: int = 1536


QUICK = Sizes(
    document_tokens=512,
    decode_tokens=32,
    dialogues=1,
    items=1,
    filler_tokens=100,
    evicted_fracs=(0.5,),
    fixed_fracs=(0.5,),
    thresholds=(0.1,),
    guarded_recent=192,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One policy at one strength.

    Attributes:
        evicted_frac: of the tokens seen; None for a fixed budget, and for policies without a budget.
        max_entries: a fixed budget.
        threshold: None for all but ``threshold``.
        recent: guarded last tokens, where they differ from the schedule's.
    """

    policy: str
    retention: RetentionOptions
    evicted_frac: float | None = None
    max_entries: int | None = None
    threshold: float | None = None
    recent: int | None = None

    @property
    def strength(self) -> str:
        """Of the table: the share that is evicted, the entries that stay, or the threshold."""
        recent = "" if self.recent is None else f" r{self.recent}"
        recent += " int8" if self.retention.compress else ""
        if self.max_entries is not None:
            return f"to {self.max_entries}{recent}"
        if self.evicted_frac is not None:
            return f"{100 * self.evicted_frac:g} %"
        return "" if self.threshold is None else f"< {self.threshold:g}{recent}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What is read and compared.

    Attributes:
        schedule: interval, window, layers and guards of every setting; its own policy evicts nothing.
        llm: makes an engine with the given retention, large enough for all documents at once.
    """

    sizes: Sizes
    documents: list[Document]
    items: list[Item]
    schedule: RetentionOptions
    settings: list[Setting]
    llm: Callable[[RetentionOptions | None], LLM]


def build(
    model: LoadedModel,
    sizes: Sizes,
    *,
    data_dir: str | None,
    schedule: RetentionOptions,
    policies: Sequence[str] = POLICIES,
) -> Bench:
    """Documents, tasks and settings for ``model``; ``data_dir`` None: CPython's language reference only.

    Raises:
        ValueError: a set of ``data_dir`` is missing or too small.
    """
    tokenizer = model.tokenizer
    documents = load_documents(
        tokenizer,
        data_dir,
        document_tokens=sizes.document_tokens,
        decode_tokens=sizes.decode_tokens,
        documents=sizes.documents,
        dialogues=sizes.dialogues,
    )
    pool = build_pool("full", model)
    longest = max(
        sum(len(d.ids) for d in documents), 32 * (sizes.visible_tokens + sizes.shared_tokens)
    )

    def llm(retention: RetentionOptions | None) -> LLM:
        options = EngineOptions(retention=retention, num_kv_slots=longest)
        return LLM(model, executors=pool, options=options)

    return Bench(
        sizes=sizes,
        documents=documents,
        items=_items(partial(tokenizer.encode, add_special_tokens=False), sizes),
        schedule=schedule,
        settings=make_settings(schedule, sizes, policies),
        llm=llm,
    )


def make_settings(
    schedule: RetentionOptions, sizes: Sizes, policies: Sequence[str]
) -> list[Setting]:
    """Every policy of ``policies`` at every strength, on one schedule."""
    found = []
    for name in policies:
        if name == "full":
            found.append(_setting(schedule, Full()))
        elif name == "threshold":
            found += [
                _setting(
                    schedule,
                    Threshold(threshold=limit),
                    threshold=limit,
                    recent=sizes.guarded_recent,
                )
                for limit in sizes.thresholds
            ]
        else:
            make = SCORED[name]
            found += [
                _setting(schedule, make(evicted_frac=frac), evicted_frac=frac)
                for frac in sizes.evicted_fracs
            ]
            found += [
                _setting(
                    schedule,
                    make(evicted_frac=0.0, max_entries=count),
                    max_entries=count,
                    recent=round(sizes.recent_frac * count),
                )
                for count in _fixed_budgets(schedule, sizes)
            ]
            if name in sizes.int8_policies:
                found.append(_int8(schedule, make, max(_fixed_budgets(schedule, sizes)), sizes))
    return found


def _setting(schedule: RetentionOptions, policy: RetentionPolicy, **strength: Any) -> Setting:
    recent = strength.get("recent") or schedule.recent
    retention = replace(schedule, policy=policy, recent=recent)
    return Setting(policy=policy.name, retention=retention, **strength)


def _int8(
    schedule: RetentionOptions, make: type[ScoredPolicy], count: int, sizes: Sizes
) -> Setting:
    """The last tokens stay by the policy's own choice: those that are guarded would not be converted."""
    policy = make(evicted_frac=0.0, max_entries=count, recent_frac=sizes.recent_frac)
    retention = replace(schedule, policy=policy, compress="old")
    return Setting(policy=policy.name, retention=retention, max_entries=count)


def _fixed_budgets(schedule: RetentionOptions, sizes: Sizes) -> list[int]:
    """Entries with which, and the running chunk's beside them, a document's peak falls by each share."""
    counts = (
        round((1.0 - frac) * sizes.document_tokens) - schedule.interval
        for frac in sizes.fixed_fracs
    )
    return [count for count in counts if count > 0]


def _items(encode: Any, sizes: Sizes) -> list[Item]:
    """Each with another part of CPython's language reference as its filler."""
    text = list(encode("\n\n".join(PythonDocs().documents())))
    made = []
    for index, make in enumerate((copy_item, key_value_item) * sizes.items):
        start = index * sizes.filler_tokens
        made.append(make(encode, text[start : start + sizes.filler_tokens], index))
    return made
