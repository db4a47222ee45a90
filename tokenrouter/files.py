"""Files that are there as a whole or not at all."""

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Writes ``content`` beside ``path`` (``.partial``) and puts it in its place; the folder must exist."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    os.replace(partial, path)
