"""Arguments, the measurement, its table, and the JSON object."""

import argparse
from dataclasses import asdict
from typing import Any

from tokenrouter.evaluation.bench import (
    MODEL,
    check_least,
    log_plainly,
    parser_for,
    provenance_of,
    put_out,
)
from tokenrouter.models import load_model

from .measures import as_values, format_found, measure
from .setup import QUICK, Bench, Sizes, build


def run(bench: Bench) -> dict[str, Any]:
    """Measures and prints the table."""
    found = measure(bench)
    print(format_found(found), flush=True)
    return {**as_values(found), "sizes": asdict(bench.sizes), "repeats": bench.repeats}


def parse_arguments(description: str) -> argparse.Namespace:
    """The command line's options.

    Args:
        description: of the script, for ``--help``.

    Raises:
        SystemExit: an option that does not exist or is out of its range, which stderr then names.
    """
    parser = parser_for(description)
    parser.add_argument("--repeats", type=int, default=3, help="turns that count")
    args = parser.parse_args()
    check_least(parser, args, 1, "repeats")
    return args


def main(description: str) -> None:
    """Measures, prints the table, and as the last line one JSON object with provenance.

    Args:
        description: of the script, for ``--help``.
    """
    args = parse_arguments(description)
    log_plainly()
    model = load_model(MODEL, dtype="bfloat16")
    provenance = provenance_of(model)
    found = run(build(model, QUICK if args.quick else Sizes(), repeats=args.repeats))
    put_out({**found, "quick": args.quick, "provenance": provenance})
