"""Arguments, all measurements in order, and the JSON object."""

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
from tokenrouter.models import load_model

from .kv import int8_kv
from .measures import Served, serve_at_once, serve_poisson, warm_up
from .report import as_values, claim_ratios, format_served
from .setup import QUICK, TOKEN_LEVEL, Bench, Sizes, build


def run(bench: Bench) -> dict[str, Any]:
    """Measures everything; each workload's table is printed when it is done."""
    warm_up(bench)
    mixed = _show(serve_at_once(bench, "mixed_lengths"))
    crowd = _show(serve_at_once(bench, "crowd"))
    poisson = _show(serve_poisson(bench, crowd))
    uniform = _show(serve_at_once(bench, "uniform"))
    kv = int8_kv(bench)
    ratios = claim_ratios(crowd)
    found = {claim: ratio.value for claim, ratio in ratios.items()}
    found |= {f"{name}_kv_decode2k_vs_full": rate for name, (rate, _) in kv.items()}
    return {
        **{key: value.median for key, value in found.items()},
        **{f"{name}_kv_bytes_frac": frac for name, (_, frac) in kv.items()},
        "ranges": {key: [value.min, value.max] for key, value in found.items()},
        "tokenlevel": TOKEN_LEVEL,
        "baselines": {claim: ratio.baseline for claim, ratio in ratios.items()},
        "workloads": {
            served.name: as_values(served) for served in (mixed, crowd, poisson, uniform)
        },
        "kernels": bench.systems[TOKEN_LEVEL].pool.kernels.name,
        "sizes": asdict(bench.sizes),
        "repeats": bench.repeats,
    }


def _show(served: Served) -> Served:
    print(format_served(served), flush=True)
    return served


def parse_arguments(description: str) -> argparse.Namespace:
    """The command line's options, and ``sizes``: how much is run.

    Args:
        description: of the script, for ``--help``.

    Raises:
        SystemExit: an option that does not exist or is out of its range, which stderr then names.
    """
    parser = parser_for(description)
    parser.add_argument("--repeats", type=int, default=3, help="passes that count")
    parser.add_argument(
        "--static-batch",
        type=int,
        help="requests of the static batches in tokenlevel_vs_static_* (default: 8; with --quick 2)",
    )
    args = parser.parse_args()
    check_least(parser, args, 1, "repeats")
    sizes = QUICK if args.quick else Sizes()
    if args.static_batch is not None and not 1 <= args.static_batch <= sizes.seats:
        parser.error(
            f"--static-batch must lie in 1 .. {sizes.seats}, the requests that run at once, got {args.static_batch}"
        )
    args.sizes = replace(sizes, static_batch=args.static_batch or sizes.static_batch)
    return args


def main(description: str) -> None:
    """Measures, prints a table per workload, and as the last line one JSON object with provenance.

    Args:
        description: of the script, for ``--help``.
    """
    args = parse_arguments(description)
    log_plainly()
    model = load_model(MODEL, dtype="bfloat16")
    provenance = provenance_of(model)
    found = run(build(model, args.sizes, repeats=args.repeats))
    put_out({**found, "quick": args.quick, "provenance": provenance})
