"""Text to evaluate on: CPython's language reference by default, local sets by choice.

Thresholds are set on other documents than quality is measured on: ``calibration_documents`` and
``evaluation_documents`` are the two sides of one fixed split.
"""

import hashlib
import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

CALIBRATION_EVERY = 4
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
        pattern: which files of the set, e.g. ``valid.txt`` or ``*.txt``.
        document_start: regular expression; a document starts at each line that it matches. None:
            one document per file.
    """

    name: str
    data_dir: str | None
    folder: str
    pattern: str = "*.txt"
    document_start: str | None = None

    def documents(self) -> list[str]:
        """The documents, file by file in the order of their names, each in its own order.

        Raises:
            ValueError: no folder of local sets, nothing in it that fits, or a file that is no text.
        """
        folder = local_folder(self.name, self.data_dir, self.folder)
        if not folder.is_dir():
            raise ValueError(f"data {self.name!r}: no folder {folder}; {DATA_DIR_HELP}")
        files = files_in(folder, self.pattern, name=self.name)
        texts = [read_text(file, "data") for file in files]
        if self.document_start is None:
            return texts
        return [part for text in texts for part in _cut(text, self.document_start)]


def local_folder(name: str, data_dir: str | None, folder: str) -> Path:
    """Where the set ``name`` lies; raises ValueError where no folder of local data sets is set."""
    if not data_dir:
        raise ValueError(f"data {name!r} needs a folder of local data sets: {DATA_DIR_HELP}")
    return Path(data_dir).expanduser() / folder


def files_in(folder: Path, pattern: str, *, name: str) -> list[Path]:
    """The files of the set ``name``, in the order of their names; raises ValueError where none fits."""
    files = sorted(folder.glob(pattern))
    if not files:
        raise ValueError(f"data {name!r}: no file {pattern} in {folder}; {DATA_DIR_HELP}")
    return files


def read_text(path: Path, option: str) -> str:
    """The text of a UTF-8 file, with or without a byte-order mark; raises ValueError, naming ``option``, for others."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is no UTF-8 text (byte {error.start} is none): check {option}, or convert it, e.g. with iconv"
        ) from None


def calibration_documents(documents: Sequence[str]) -> list[str]:
    """The side on which thresholds are set: every fourth document, from the first on.

    Paragraphs that some evaluated document also has are left out, because documents quote each
    other.

    Args:
        documents: all documents of a source, in its order.

    Raises:
        ValueError: fewer than two documents, or nothing is left.
    """
    evaluated = {p for text in evaluation_documents(documents) for p in _paragraphs(text)}
    own = (
        "\n\n".join(p for p in _paragraphs(text) if p not in evaluated)
        for text in documents[::CALIBRATION_EVERY]
    )
    kept = [text for text in own if text]
    if not kept:
        raise ValueError(
            "no text is left to calibrate on: every paragraph of every fourth document is in "
            "another document too; choose a text without repeats"
        )
    return kept


def evaluation_documents(documents: Sequence[str]) -> list[str]:
    """The side that prompts and evaluation windows are cut from: all but every fourth document.

    Args:
        documents: all documents of a source, in its order.

    Raises:
        ValueError: fewer than two documents.
    """
    if len(documents) < 2:
        raise ValueError(
            f"calibration and evaluation need documents of their own, and this text has "
            f"{len(documents)}: give two files or more, or say with data.document_start where in "
            "a file a document starts"
        )
    return [text for index, text in enumerate(documents) if index % CALIBRATION_EVERY]


def _cut(text: str, document_start: str) -> list[str]:
    """Parts of ``text`` from each matching line to the next; what precedes the first is one too."""
    starts = [found.start() for found in re.finditer(document_start, text, flags=re.MULTILINE)]
    edges = [0, *starts, len(text)]
    parts = (text[start:stop] for start, stop in pairwise(edges))
    return [part for part in parts if part.strip()]


def _paragraphs(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


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
