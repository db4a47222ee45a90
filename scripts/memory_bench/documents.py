"""What is read: long documents, dialogues, and where each one's decode begins."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
) -> list[Document]:
    """The first documents of each set that are long enough, cut to ``document_tokens``, and the longest dialogues.

    Without a folder of local sets: parts of CPython's language reference, twice as many as ``documents`` says.

    Raises:
        ValueError: a set is missing, or has too few documents that are long enough.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def cut(source: str, ids: list[int]) -> Document:
        ids = ids[:document_tokens]
        return Document(source=source, ids=ids, prompt_len=len(ids) - decode_tokens)

    if data_dir is None:
        ids = encode("\n\n".join(evaluation_documents(PythonDocs().documents())))
        return [cut("python_docs", part) for part in windows(ids, document_tokens, 2 * documents)]
    sets = {
        "wiki_articles": iter(_lines(data_dir, "wiki_articles", "*.txt")),
        "arxiv_latex": (
            json.loads(line)["text"] for line in _lines(data_dir, "arxiv_latex", "*.jsonl")
        ),
    }
    found = []
    for source, texts in sets.items():
        found += [
            cut(source, ids) for ids in _long(source, texts, encode, document_tokens, documents)
        ]
    texts = _dialogues(tokenizer, data_dir)
    longest = sorted(texts, key=len, reverse=True)[:dialogues]
    return found + [cut("mt_bench_101", encode(text)) for text in longest]


def _lines(data_dir: str, folder: str, pattern: str) -> list[str]:
    """Each line is a document."""
    text = LocalText(
        name=folder, data_dir=data_dir, folder=folder, pattern=pattern, document_start="^"
    )
    return text.documents()


def _long(
    source: str, texts: Iterator[str], encode: Encode, num_tokens: int, count: int
) -> list[list[int]]:
    found: list[list[int]] = []
    while len(found) < count:
        if (text := next(texts, None)) is None:
            raise ValueError(
                f"{source} has {len(found)} documents of {num_tokens} tokens, and {count} are asked for: "
                "lower --documents"
            )
        if len(ids := encode(text)) >= num_tokens:
            found.append(ids)
    return found


def _dialogues(tokenizer: Any, data_dir: str) -> list[str]:
    """In the tokenizer's chat template, or as plain turns where it has none."""
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
    return found
