"""Arguments, all measurements in order, and the JSON object."""

import argparse
from dataclasses import asdict
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

from .copies import COPIES_TITLE, Copied, copies, format_copied
from .release import as_values, format_release, release
from .serving import Served, format_served, serve
from .setup import FORMS, QUICK, Bench, Sizes, build


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
    parser = parser_for(description)
    parser.add_argument("--repeats", type=int, default=3, help="passes that count")
    add_data_dir(parser)
    args = parser.parse_args()
    check_least(parser, args, 1, "repeats")
    return args


def main(description: str) -> None:
    args = parse_arguments(description)
    log_plainly()
    model = load_model(MODEL, dtype="bfloat16")
    provenance = provenance_of(model)
    sizes = QUICK if args.quick else Sizes()
    found = run(build(model, sizes, repeats=args.repeats, data_dir=args.data_dir))
    put_out({**found, "quick": args.quick, "provenance": provenance})
