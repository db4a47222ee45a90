"""Files that are there as a whole or not at all, and the two files of something trained."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor


def replace_file(path: Path, content: bytes) -> None:
    """Writes ``content`` beside ``path`` (``.partial``) and puts it in its place; the folder must exist."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    os.replace(partial, path)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedFormat:
    """How something trained is read: ``<name>.json`` says what it is, a second file beside it holds the numbers.

    Attributes:
        noun: what it is, for messages, such as ``trained router``.
        name: ``format`` in the json file.
        versions: values of ``format_version`` that can be read.
        keys: that the json file must have, beside those two; ``sha256`` of the second file is one.
        option: where its path is given.
        remedy: how to get another one.
    """

    noun: str
    name: str
    versions: tuple[int, ...]
    keys: frozenset[str]
    option: str
    remedy: str

    def read_header(self, path: Path, *, given: str = "") -> dict[str, Any]:
        """The json file, with every key that is needed.

        Args:
            path: of it.
            given: put before the message that there is none.

        Raises:
            ValueError: it is missing, damaged, of another format or version, or lacks a key.
        """
        try:
            header = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(
                f"{given}no {self.noun} at {path} ({error.strerror or error}): give {self.option}, or {self.remedy}"
            ) from None
        except ValueError as error:
            raise ValueError(f"{path} is damaged or cut short ({error}): {self.remedy}") from None
        if not isinstance(header, dict) or header.get("format") != self.name:
            raise ValueError(f"{path} is no {self.noun} (no format {self.name!r}): {self.remedy}")
        if header.get("format_version") not in self.versions:
            raise ValueError(
                f"{path} has format version {header.get('format_version')!r}, and this version of tokenrouter reads "
                f"{', '.join(map(str, self.versions))}: {self.remedy}"
            )
        if missing := sorted(self.keys - header.keys()):
            raise ValueError(f"{path} lacks {', '.join(missing)}: {self.remedy}")
        return header

    def read_payload(self, path: Path, header: Mapping[str, Any]) -> bytes:
        """The second file; raises ValueError when it is missing, or not the one that ``header`` was written with."""
        try:
            payload = path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"the {self.noun} {path.with_suffix('.json')} needs {path.name} beside it ({error.strerror}): copy "
                "both files"
            ) from None
        if hashlib.sha256(payload).hexdigest() != header["sha256"]:
            raise ValueError(
                f"{path} is cut short or of another training than {path.with_suffix('.json').name}: it has "
                f"{len(payload)} bytes, and {header.get('num_bytes')} were written; copy both files again, or "
                f"{self.remedy}"
            )
        return payload

    def tensors(self, path: Path, payload: bytes) -> dict[str, Tensor]:
        """What a second file ``path`` of tensors holds; raises ValueError when it is damaged."""
        try:
            return load(payload)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): {self.remedy}") from None
