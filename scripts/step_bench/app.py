"""Arguments, the measurement, its table, and the JSON object."""

import argparse
from dataclasses import asdict, replace
from typing import Any

from tokenrouter.evaluation.bench import (
    MODEL,
    check_least,
    log_plainly,
    parser_for,
    provenance_of,
    put_out,
)
from tokenrouter.executors import POOLS
from tokenrouter.models import LoadedModel, load_model
from tokenrouter.routers import make_router

from .measures import QUICK, Sizes, as_values, build, format_turns, measure


def run(
    model: LoadedModel, sizes: Sizes, *, repeats: int, router: str, executor: str
) -> dict[str, Any]:
    """Measures and prints the table."""
    llms = build(model, sizes, router=router, executor=executor)
    turns = measure(llms, sizes, repeats)
    print(format_turns(turns), flush=True)
    facts = {"sizes": asdict(sizes), "repeats": repeats, "router": router, "executor": executor}
    return {**as_values(turns), **facts, "kernels": llms["greedy"].pool.kernels.name}


def parse_arguments(description: str) -> argparse.Namespace:
    """The command line's options, and ``sizes``: how much is run.

    Args:
        description: of the script, for ``--help``.

    Raises:
        SystemExit: an option that does not exist or is out of its range, which stderr then names.
    """
    parser = parser_for(description)
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    parser.add_argument("--batch", type=int, help="requests that decode together (default: 32)")
    parser.add_argument("--context", type=int, help="tokens of their prompts (default: 512)")
    parser.add_argument("--router", default="rule", help="by its name (default: rule)")
    parser.add_argument("--executor", choices=POOLS, default="int8_shared", help="the pool")
    args = parser.parse_args()
    sizes = {name: value for name in ("batch", "context") if (value := getattr(args, name))}
    check_least(parser, args, 1, "repeats", "batch", "context")
    try:
        make_router(args.router)
    except ValueError as error:
        parser.error(f"--router: {error}")
    args.sizes = replace(QUICK if args.quick else Sizes(), **sizes)
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
    chosen = {"repeats": args.repeats, "router": args.router, "executor": args.executor}
    found = run(model, args.sizes, **chosen)
    put_out({**found, "quick": args.quick, "provenance": provenance})
