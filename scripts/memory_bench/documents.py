"""What is read: long documents, dialogues, and where each one's decode begins."""

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tokenrouter.workloads import LocalText, PythonDocs, evaluation_documents, windows

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """Token ids of one text.

    Attributes:
        source: name of the data set.
        prompt_len: so many are the prompt; the others are fed one by one.
    """

    source: str
    ids: list[int]
    prompt_len: int


def load_documents(
    tokenizer: Any,
    data_dir: str | None,
    *,
    document_tokens: int,
    decode_tokens: int,
    documents: int,
    dialogues: int,
    start: int = 0,
) -> list[Document]:
    """The first documents of each set that are long enough, cut to ``document_tokens``, and the longest dialogues.

    Args:
        tokenizer: of the model.
        data_dir: folder of local sets; None: parts of CPython's language reference in a drawn order, twice as many as
            ``documents`` says and no dialogues.
        document_tokens: of each document.
        decode_tokens: the last ones of each document and dialogue, behind its prompt.
        documents: of each set.
        dialogues: of the set of dialogues.
        start: so many of those that would be taken are passed over in each set, so that two calls have no document in
            common when the second starts where the first ends.

    Raises:
        ValueError: a set is missing, or has too few documents that are long enough.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def cut(source: str, ids: list[int]) -> Document:
        ids = ids[:document_tokens]
        return Document(source=source, ids=ids, prompt_len=len(ids) - decode_tokens)

    if data_dir is None:
        parts = _parts(encode, document_tokens)
        wanted = _from(parts, start, 2 * documents, "python_docs", document_tokens)
        return [cut("python_docs", part) for part in wanted]
    found = []
    for source, texts in _prose(data_dir).items():
        long = (ids for text in texts if len(ids := encode(text)) >= document_tokens)
        wanted = _from(long, start, documents, source, document_tokens)
        found += [cut(source, ids) for ids in wanted]
    talks = (encode(text) for text in _dialogues(tokenizer, data_dir))
    long = (ids for ids in talks if len(ids) > decode_tokens)
    wanted = _from(long, start, dialogues, "mt_bench_101", decode_tokens + 1)
    return found + [cut("mt_bench_101", ids) for ids in wanted]


def _prose(data_dir: str) -> dict[str, Iterable[str]]:
    """By set its texts."""
    papers = _lines(data_dir, "arxiv_latex", "*.jsonl")
    return {
        "wiki_articles": _lines(data_dir, "wiki_articles", "*.txt"),
        "arxiv_latex": (json.loads(line)["text"] for line in papers),
    }


def _parts(encode: Encode, num_tokens: int) -> list[list[int]]:
    """The language reference in parts, none overlapping, in an order that does not depend on how many are taken."""
    ids = encode("\n\n".join(evaluation_documents(PythonDocs().documents())))
    parts = windows(ids, num_tokens, len(ids) // num_tokens)
    random.Random(0).shuffle(parts)
    return parts


def _from(
    documents: Iterable[list[int]], start: int, count: int, source: str, num_tokens: int
) -> list[list[int]]:
    if not count:
        return []
    found = list(islice(documents, start + count))
    if len(found) < start + count:
        skipped = f", {start} that are skipped among them" if start else ""
        raise ValueError(
            f"{source} has {len(found)} documents of {num_tokens} tokens, and {start + count} are asked for{skipped}: "
            "lower --documents, --dialogues or --start"
        )
    return found[start:]


def _lines(data_dir: str, folder: str, pattern: str) -> list[str]:
    """Each line is a document."""
    text = LocalText(
        name=folder, data_dir=data_dir, folder=folder, pattern=pattern, document_start="^"
    )
    return text.documents()


def _dialogues(tokenizer: Any, data_dir: str) -> list[str]:
    """The longest first, in the tokenizer's chat template, or as plain turns where it has none."""
    found = []
    for line in _lines(data_dir, "mt_bench_101", "*.jsonl"):
        turns = json.loads(line)["history"]
        messages = [
            {"role": role, "content": turn[key]}
            for turn in turns
            for role, key in (("user", "user"), ("assistant", "bot"))
        ]
        if getattr(tokenizer, "chat_template", None):
            found.append(tokenizer.apply_chat_template(messages, tokenize=False))
        else:
            found.append("\n".join(f"{m['role']}: {m['content']}" for m in messages))
    return sorted(found, key=len, reverse=True)
