"""Arguments, all measurements in order, and the JSON object."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from scripts.router_bench.arguments import add_text_options, check_text_options
from scripts.router_bench.setup import PLAIN, Bench, build
from tokenrouter.evaluation.bench import (
    MODEL,
    check_least,
    log_plainly,
    parser_for,
    provenance_of,
    put_out,
)
from tokenrouter.models import load_model

from .cost import Numbers, measure_costs, measure_shared, serving
from .quality import measure_quality
from .report import Row, claims, cost_rows, cost_table, quality_rows, quality_table, shared_table
from .ways import QUICK, Sizes

PARTS = ("shared", "cost", "quality")


def run(bench: Bench, sizes: Sizes, parts: Sequence[str] = PARTS) -> dict[str, Any]:
    """Measures ``parts``; each table is printed when it is done. What was not measured is empty."""
    served = serving(bench, sizes)
    shared: dict[str, dict[str, Numbers]] = {}
    costs: list[Row] = []
    qualities: list[Row] = []
    if "shared" in parts:
        shared = measure_shared(served)
        print(shared_table(shared), flush=True)
    if "cost" in parts:
        costs = cost_rows(measure_costs(served))
        print(cost_table(costs), flush=True)
    if "quality" in parts:
        found = {text.name: measure_quality(bench, text) for text in bench.texts}
        qualities = quality_rows(found)
        print(quality_table(qualities), flush=True)
    return {
        **claims(qualities, costs, shared),
        "quality": qualities,
        "costs": costs,
        "shared_prompt": shared,
        "window_tokens": {text.name: len(text.windows[0]) for text in bench.texts},
        "sizes": asdict(sizes),
    }


def parse_arguments(description: str) -> argparse.Namespace:
    """The command line's options, and ``sizes``: how much is run.

    Args:
        description: of the script, for ``--help``.

    Raises:
        SystemExit: an option that does not exist or is out of its range, which stderr then names.
    """
    parser = _parser(description)
    args = parser.parse_args()
    check_text_options(parser, args)
    check_least(parser, args, 1, "turns")
    sizes = QUICK if args.quick else Sizes()
    if args.windows is not None:
        sizes = replace(sizes, quality=replace(sizes.quality, windows=args.windows))
    args.sizes = sizes if args.turns is None else replace(sizes, turns=args.turns)
    return args


def _parser(description: str) -> argparse.ArgumentParser:
    parser = parser_for(description)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    add_text_options(parser, Sizes().quality.windows)
    parser.add_argument(
        "--turns", type=int, help=f"of prefill that count (default: {Sizes().turns})"
    )
    return parser


def main(description: str) -> None:
    """Measures, prints the tables, and as the last line one JSON object with provenance; writes it to ``--json``.

    Args:
        description: of the script, for ``--help``.
    """
    args = parse_arguments(description)
    log_plainly()
    model = load_model(MODEL, dtype="float32")
    bench = build(
        model,
        args.sizes.quality,
        executor=PLAIN,
        texts=args.texts,
        data_dir=args.data_dir,
        routers=args.routers,
    )
    provenance = provenance_of(model)
    found = {**run(bench, args.sizes, args.only), "quick": args.quick, "provenance": provenance}
    put_out(found, args.json)
