"""Arguments, the measurement, its table, and the JSON object."""

import argparse
import logging
from typing import Any

from tokenrouter.evaluation.bench import (
    MODEL,
    add_data_dir,
    check_least,
    log_plainly,
    parser_for,
    provenance_of,
    put_out,
)
from tokenrouter.models import load_model
from tokenrouter.models.loader import hf_model_for

from .measures import ALL, format_found, measure
from .setup import BATCH_SIZE, TASKS, Bench, build, load_requests

QUICK_LIMIT = 4


def run(bench: Bench) -> dict[str, Any]:
    """Measures and prints the table."""
    found, differences = measure(bench)
    print(format_found(found, differences), flush=True)
    ratio = found[ALL].ratio
    return {
        "lm_eval_vs_transformers": ratio.median,
        "ranges": {"lm_eval_vs_transformers": [ratio.min, ratio.max]},
        "tasks": {task: one.as_values() for task, one in found.items()},
        **differences,
        "repeats": bench.repeats,
        "batch_size": BATCH_SIZE,
    }


def parse_arguments(description: str) -> argparse.Namespace:
    """The command line's options.

    Args:
        description: of the script, for ``--help``.

    Raises:
        SystemExit: an option that does not exist or is out of its range, which stderr then names.
    """
    parser = parser_for(description)
    parser.add_argument("--limit", type=int, default=100, help="questions of each task")
    parser.add_argument("--repeats", type=int, default=3, help="turns that count")
    parser.add_argument(
        "--tasks", nargs="+", default=list(TASKS), help="multiple choice of lm-eval"
    )
    add_data_dir(parser, without="needed: the tasks' questions are there")
    args = parser.parse_args()
    check_least(parser, args, 1, "repeats", "limit")
    return args


def main(description: str) -> None:
    """Measures, prints the table, and as the last line one JSON object with provenance.

    Args:
        description: of the script, for ``--help``.

    Raises:
        SystemExit: no harness, no data, or a task that does not fit; stderr says which.
    """
    args = parse_arguments(description)
    log_plainly()
    for name in ("lm_eval", "tokenrouter.evaluation.progress"):
        logging.getLogger(name).setLevel(logging.ERROR)
    limit = min(args.limit, QUICK_LIMIT) if args.quick else args.limit
    try:
        requests = load_requests(args.tasks, limit=limit, data_dir=args.data_dir)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    model = load_model(MODEL, dtype="bfloat16")
    provenance = provenance_of(model)
    hf_model = hf_model_for(MODEL, dtype="bfloat16")
    found = run(build(model, hf_model, requests, repeats=args.repeats))
    put_out({**found, "limit": limit, "quick": args.quick, "provenance": provenance})
