"""Text in JSON lines: a document per line, in one of its fields."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenrouter.workloads.text import files_in, local_folder, read_text


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonLines:
    """JSON lines in the folder of local data sets.

    Args:
        data_dir: that folder; None where it was not set.
        folder: the set's folder in it.
        pattern: which files of the set.
        field: the field that holds the text.
    """

    name: str
    data_dir: str | None
    folder: str
    pattern: str = "*.jsonl"
    field: str = "text"

    def documents(self) -> list[str]:
        """The documents, file by file in the order of their names; blank lines and blank texts are left out.

        Raises:
            ValueError: no folder of local sets, nothing in it that fits, or a line without the field.
        """
        folder = local_folder(self.name, self.data_dir, self.folder)
        files = files_in(folder, self.pattern, name=self.name)
        texts = [
            self._text(line, file, number)
            for file in files
            for number, line in enumerate(read_text(file, "data").split("\n"), 1)
            if line.strip()
        ]
        return [text for text in texts if text.strip()]

    def _text(self, line: str, file: Path, number: int) -> str:
        try:
            row: Any = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"data {self.name!r}: line {number} of {file} is no JSON ({error})"
            ) from error
        text = row.get(self.field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            found = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
            raise ValueError(
                f"data {self.name!r}: line {number} of {file} has no text in the field {self.field!r}; it has: {found}"
            )
        return text
