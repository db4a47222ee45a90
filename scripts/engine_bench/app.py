"""Arguments, all measurements in order, and the JSON object."""

import argparse
import json
from typing import Any

from tokenrouter.evaluation.bench import MODEL, log_plainly, parser_for, provenance_of, put_out
from tokenrouter.kernels import BACKENDS
from tokenrouter.models import load_model
from tokenrouter.models.loader import hf_model_for

from .measures import decode_1, decode_32, prefill_256, prefill_1024, routing, serve
from .quality import quality
from .setup import QUICK, Bench, Sizes, build


def run(bench: Bench) -> dict[str, Any]:
    """Measures everything; medians by key, and the smallest and largest of each ratio."""
    found = serve(bench)
    values = routing(bench)
    for measure in (prefill_256, prefill_1024, decode_1, decode_32):
        found |= measure(bench)
    values |= quality(bench)
    return {
        **{key: value.median for key, value in found.items()},
        **values,
        "decode32_context": bench.sizes.decode_context,
        "executors": {name: pool.description for name, pool in bench.pools.items()},
        "kernels": bench.pools["int8"].kernels.name,
        "repeats": bench.repeats,
        "quick": bench.sizes is QUICK,
        "ranges": {key: [value.min, value.max] for key, value in found.items()},
    }


def parse_arguments(description: str) -> argparse.Namespace:
    """The command line's options.

    Args:
        description: of the script, for ``--help``.

    Raises:
        SystemExit: an option that does not exist or is out of its range, which stderr then names.
    """
    parser = parser_for(description)
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    parser.add_argument("--high-frac", type=float, default=0.1, help="routed's budget")
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="of the kernels")
    return parser.parse_args()


def main(description: str) -> None:
    """Measures, prints provenance, ratios and spreads, and as the last line one JSON object of medians.

    Args:
        description: of the script, for ``--help``.
    """
    args = parse_arguments(description)
    log_plainly()
    model = load_model(MODEL, dtype="float32")
    provenance = provenance_of(model)
    print(json.dumps(provenance, default=str))
    bench = build(
        model,
        hf_model_for(MODEL, dtype="bfloat16"),
        QUICK if args.quick else Sizes(),
        repeats=args.repeats,
        high_frac=args.high_frac,
        backend=args.backend,
    )
    put_out(run(bench))
