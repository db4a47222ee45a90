"""Everything that is built before anything is measured: what is read, and the engines of what is compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tokenrouter import LLM, EngineOptions
from tokenrouter.evaluation.retrieval.items import Item, make_items
from tokenrouter.executors import ExecutorPool, build_pool
from tokenrouter.kvcache.retention import RetentionOptions
from tokenrouter.models import LoadedModel
from tokenrouter.workloads import PythonDocs

from .documents import Document, load_documents
from .settings import FULL, INT8, POLICIES, Setting, make_settings, retrieval_settings
from .sizes import Sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What is read and compared.

    Attributes:
        schedule: interval, window, layers and guards of every setting, its own policy evicts nothing; None: settings
            have schedules of their own.
        retrieval_settings: that the items are read with, at their own decisions.
        llm: makes an engine for a setting, large enough for all documents at once; of None, the reference.
    """

    sizes: Sizes
    documents: list[Document]
    items: list[Item]
    schedule: RetentionOptions | None
    settings: list[Setting]
    retrieval_settings: list[Setting]
    llm: Callable[[Setting | None], LLM]


def build(
    model: LoadedModel,
    sizes: Sizes,
    *,
    data_dir: str | None,
    schedule: RetentionOptions,
    policies: Sequence[str] = POLICIES,
    settings: Sequence[Setting] | None = None,
) -> Bench:
    """Documents, tasks and settings for ``model``.

    Args:
        model: with a tokenizer.
        sizes: how much is read.
        data_dir: folder of local sets; None: CPython's language reference only.
        schedule: of every policy of ``policies``.
        policies: run at every strength of ``sizes``.
        settings: run instead, with schedules of their own.

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
        start=sizes.start,
    )
    pool = build_pool("full", model)
    longest = max(
        sum(len(d.ids) for d in documents), 32 * (sizes.visible_tokens + sizes.shared_tokens)
    )
    return Bench(
        sizes=sizes,
        documents=documents,
        items=_items(partial(tokenizer.encode, add_special_tokens=False), sizes),
        retrieval_settings=retrieval_settings(schedule, sizes, policies)
        if settings is None
        else [setting for setting in settings if setting.policy not in (FULL, INT8)],
        schedule=schedule if settings is None else None,
        settings=make_settings(schedule, sizes, policies) if settings is None else [*settings],
        llm=partial(_llm, model, pool, longest),
    )


def _llm(model: LoadedModel, pool: ExecutorPool, num_slots: int, setting: Setting | None) -> LLM:
    if setting is None:
        return LLM(model, executors=pool, options=EngineOptions(num_kv_slots=num_slots))
    options = EngineOptions(
        retention=setting.retention,
        kv_cache_dtype=setting.kv_cache_dtype,
        num_kv_slots=num_slots,
    )
    return LLM(model, router=setting.router, executors=pool, options=options)


def _items(encode: Any, sizes: Sizes) -> list[Item]:
    """Each with another part of CPython's language reference as its filler."""
    if not sizes.items:
        return []
    return make_items(
        encode,
        encode("\n\n".join(PythonDocs().documents())),
        sizes.items,
        context=sizes.context_tokens,
        question=sizes.question_tokens,
    )
