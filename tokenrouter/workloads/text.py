"""Text to evaluate on: CPython's language reference by default, local sets by choice."""

import hashlib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

DATA_DIR_HELP = "set TOKENROUTER_DATA_DIR, or pass paths.data_dir=<folder>"


class TextSource(Protocol):
    """Named documents. ``conf/data`` holds one config per source."""

    name: str

    def documents(self) -> list[str]:
        """The documents in a fixed order."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonDocs:
    """The language reference in ``pydoc_data.topics``: 460 kB of prose, code and grammar.

    It comes with every CPython, so nothing is fetched; its text differs a little between Python
    versions, so compare runs of one version only (provenance.json has the text's hash).
    """

    name: str = "python_docs"

    def documents(self) -> list[str]:
        """One document per topic, in alphabetical order."""
        try:
            topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        except (ImportError, AttributeError) as error:
            raise ValueError(
                "this Python has no pydoc_data.topics; choose local text, e.g. data=wikitext2"
            ) from error
        return [topics[key] for key in sorted(topics)]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalText:
    """Text files in the folder of local data sets.

    Args:
        data_dir: that folder; None where it was not set.
        folder: the set's folder in it.
        pattern: which files of the set, e.g. ``valid.txt`` or ``*.txt``; one document per file.
    """

    name: str
    data_dir: str | None
    folder: str
    pattern: str = "*.txt"

    def documents(self) -> list[str]:
        """One document per file, in the order of their names."""
        if not self.data_dir:
            raise ValueError(
                f"data {self.name!r} needs a folder of local data sets: {DATA_DIR_HELP}"
            )
        folder = Path(self.data_dir).expanduser() / self.folder
        if not folder.is_dir():
            raise ValueError(f"data {self.name!r}: no folder {folder}; {DATA_DIR_HELP}")
        files = sorted(folder.glob(self.pattern))
        if not files:
            raise ValueError(
                f"data {self.name!r}: no file {self.pattern} in {folder}; {DATA_DIR_HELP}"
            )
        return [file.read_text(encoding="utf-8") for file in files]


def text_hash(documents: Sequence[str]) -> str:
    """Short hash of the documents, for provenance."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def windows(token_ids: Sequence[int], length: int, count: int) -> list[list[int]]:
    """``count`` windows of ``length`` tokens, none overlapping, spread evenly over ``token_ids``.

    Raises:
        ValueError: there are too few tokens, or length or count is below 1.
    """
    if length < 1 or count < 1:
        raise ValueError(
            f"windows need length and count of at least 1, got length {length} and count {count}"
        )
    if len(token_ids) < length * count:
        raise ValueError(
            f"{count} windows of {length} tokens need {length * count} tokens; the text has "
            f"{len(token_ids)}: use fewer or shorter windows, or a longer text"
        )
    gap = (len(token_ids) - length * count) / count
    starts = [int(index * (length + gap)) for index in range(count)]
    return [list(token_ids[start : start + length]) for start in starts]
