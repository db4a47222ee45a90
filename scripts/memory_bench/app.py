"""Arguments, the measurement, its table, and the JSON object."""

import argparse
import json
from dataclasses import asdict, fields, replace
from typing import Any

from tokenrouter.evaluation.bench import (
    MODEL,
    add_data_dir,
    add_json,
    check_json,
    check_least,
    flag,
    log_plainly,
    parser_for,
    provenance_of,
    put_out,
)
from tokenrouter.kvcache.retention import Full, RetentionOptions
from tokenrouter.models import load_model

from .measures import measure_reference, measure_setting
from .recall import beats_controls, recall_rows, reference_facts
from .report import RECALL_TITLE, TITLE, claims, line, recall_line
from .settings import POLICIES, shipped_settings
from .setup import Bench, build
from .sizes import QUICK, Sizes
from .summary import Summary

SCHEDULE = ("interval", "window", "layers", "groups", "sinks", "recent")
OF_THE_BENCH = {"window": 128, "layers": 30, "groups": 5}
"""What served this model best (experiments/LOG.md); the library's defaults cost less in prefill."""
COUNTS = {
    "documents": "of each set",
    "dialogues": "of the set of dialogues, which needs local sets",
    "start": "documents of each set, and dialogues, that are skipped",
    "items": "of each retrieval task, at least 2; 0 leaves them out",
    "question_window": "queries before an item's decision whose attention counts; --window is the documents'",
    "guarded_recent": "last tokens that thresholds never evict",
}
"""Options of ``Sizes``, and what they say."""
FRACS = {
    "evicted_fracs": "of the tokens seen that are evicted; may be none",
    "fixed_fracs": "of the longest documents' peak that fixed budgets save; may be none",
}


def run(bench: Bench) -> dict[str, Any]:
    """Measures every setting; each one's line of the table is printed when it is done."""
    found = {**(_read_documents(bench) if bench.documents else {}), "retrieval": _recall(bench)}
    schedule = bench.schedule
    return {
        **found,
        "schedule": schedule and {name: getattr(schedule, name) for name in SCHEDULE},
        "sizes": asdict(bench.sizes),
        "quick": bench.sizes.document_tokens < Sizes().document_tokens,
    }


def _read_documents(bench: Bench) -> dict[str, Any]:
    reference = measure_reference(bench)
    summary = Summary(bench, reference)
    facts, rows = summary.facts(), []
    print(json.dumps(facts, indent=1))
    print(TITLE, flush=True)
    for setting in bench.settings:
        rows.append(summary.row(measure_setting(bench, setting, reference)))
        print(line(rows[-1]), flush=True)
    return {**claims(rows), **facts, "rows": rows}


def _recall(bench: Bench) -> dict[str, Any]:
    if not bench.items:
        return {}
    facts = reference_facts(bench)
    print(json.dumps(facts, indent=1))
    print(RECALL_TITLE, flush=True)
    rows = []
    for row in recall_rows(bench):
        rows.append(row)
        print(recall_line(row), flush=True)
    return {"tasks": facts, "beats_controls": beats_controls(rows), "rows": rows}


def parse_arguments(description: str) -> argparse.Namespace:
    """The command line's options, ``sizes`` (how much is read) and ``schedule`` (of the script's own settings).

    Args:
        description: of the script, for ``--help``.

    Raises:
        SystemExit: an option that does not exist, is out of its range or has no effect beside another; stderr names it.
    """
    parser = _parser(description)
    args = parser.parse_args()
    tuned = [
        name
        for name in ("policies", "question_window", *FRACS, *SCHEDULE)
        if getattr(args, name) is not None
    ]
    if args.only_shipped and tuned:
        parser.error(
            f"{flag(tuned[0])} has no effect with --only-shipped, which runs conf/kvcache as it is: leave one out"
        )
    given = {name: value for name in COUNTS if (value := getattr(args, name)) is not None}
    check_least(parser, args, 0, *COUNTS)
    if args.data_dir is None and args.dialogues:
        parser.error("--dialogues needs local sets: give --data-dir, or leave it out")
    for name in FRACS:
        if (fracs := getattr(args, name)) is not None:
            if not all(0 < frac < 1 for frac in fracs):
                parser.error(f"{flag(name)} must be shares between 0 and 1, got {fracs}")
            given[name] = tuple(fracs)
    args.sizes = replace(QUICK if args.quick else Sizes(), **given)
    check_least(parser, args, 1, "question_window")
    if args.sizes.items == 1:
        parser.error("--items must be 0 or at least 2, got 1: one item says nothing about a spread")
    if args.data_dir is None:
        args.sizes = replace(args.sizes, dialogues=0)
    if not (args.sizes.documents or args.sizes.dialogues or args.sizes.items):
        parser.error("nothing is read: --documents, --dialogues or --items must be more than 0")
    check_json(parser, args)
    try:
        args.schedule = _schedule(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _parser(description: str) -> argparse.ArgumentParser:
    parser = parser_for(description)
    for name, says in COUNTS.items():
        parser.add_argument(flag(name), type=int, help=says)
    for name, says in FRACS.items():
        parser.add_argument(flag(name), nargs="*", type=float, metavar="FRAC", help=says)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, help="default: all")
    parser.add_argument(
        "--only-shipped", action="store_true", help="the configs of conf/kvcache as they are"
    )
    add_data_dir(parser)
    add_json(parser)
    for name, default in default_schedule().items():
        parser.add_argument(
            f"--{name}", type=int, help=f"see RetentionOptions (default: {default})"
        )
    return parser


def default_schedule() -> dict[str, Any]:
    """What ``RetentionOptions`` has when the command line says nothing, by option."""
    default = {f.name: f.default for f in fields(RetentionOptions)} | OF_THE_BENCH
    return {name: default[name] for name in SCHEDULE}


def _schedule(args: argparse.Namespace) -> RetentionOptions:
    given = {name: value for name in SCHEDULE if (value := getattr(args, name)) is not None}
    return RetentionOptions(policy=Full(), **default_schedule() | given)


def main(description: str) -> None:
    """Measures, prints the table, and as the last line one JSON object with provenance; writes it to ``--json``.

    Args:
        description: of the script, for ``--help``.
    """
    args = parse_arguments(description)
    log_plainly()
    model = load_model(MODEL, dtype="bfloat16")
    bench = build(
        model,
        args.sizes,
        data_dir=args.data_dir,
        schedule=args.schedule,
        policies=args.policies or POLICIES,
        settings=shipped_settings() if args.only_shipped else None,
    )
    provenance = provenance_of(model)
    arguments = {
        name: value
        for name, value in vars(args).items()
        if name not in ("sizes", "schedule", "data_dir", "json")  # paths are this machine's
    } | {"has_local_sets": args.data_dir is not None}
    found = {**run(bench), "provenance": provenance, "arguments": arguments}
    put_out(found, args.json)
