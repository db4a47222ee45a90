"""Arguments, all measurements in order, and the JSON object."""

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tokenrouter.evaluation.bench import MODEL, log_plainly, parser_for, provenance_of, put_out
from tokenrouter.models import load_model
from tokenrouter.types import Phase

from .arguments import add_text_options, check_text_options
from .cost import router_costs, smooth_serving
from .kept import kept_or_measured
from .measures import Smoothed
from .plots import plot_text
from .report import as_json, cost_lines, equal_speed_lines, table
from .setup import COMPARED, EXECUTORS, PLAIN, Bench, build
from .sizes import QUICK, Sizes
from .summary import Row, at_equal_speed, claims, rows_of
from .throughput import Speeds, measure_speeds


def run(bench: Bench, plots: Path | None = None, keep: Path | None = None) -> dict[str, Any]:
    """Measures everything; the table of each text is printed when it is done.

    Args:
        bench: what is measured.
        plots: folder for a picture per text; None: no pictures.
        keep: folder for what each text showed; None: nothing is kept.
    """
    rows: list[Row] = []
    smoothed: dict[str, Smoothed | None] = {}
    equal: dict[str, Any] = {}
    speeds: dict[Phase, Speeds] = {}
    for text in bench.texts:
        found, smoothed[text.name] = kept_or_measured(bench, text, keep)
        for phase in bench.phases:
            if phase not in speeds:
                speeds[phase] = measure_speeds(bench, found.layers, phase)
        own = rows_of(text.name, found.by_key, speeds)
        beside = at_equal_speed(text.name, found.by_key, speeds)
        print(table(own), equal_speed_lines(beside), sep="\n", flush=True)
        if plots is not None:
            print(plot_text(own, plots / f"{text.name}_{bench.executor}.png"), flush=True)
        rows += own
        equal |= beside
    return {
        **claims(rows, smoothed),
        **equal,
        **run_costs(bench),
        **{phase.name.lower(): asdict(found) for phase, found in speeds.items()},
        "window_tokens": {text.name: len(text.windows[0]) for text in bench.texts},
        "phases": [phase.name.lower() for phase in bench.phases],
        "rows": rows,
    }


def run_costs(bench: Bench) -> dict[str, Any]:
    """What a decision costs, and what the smoothed path serves; the costs are printed.

    Args:
        bench: what is measured.
    """
    costs, serving = router_costs(bench), smooth_serving(bench)
    print(cost_lines(costs), flush=True)
    mlp = costs["mlp"]
    return {
        "smooth5_vs_all_high": serving and serving.median,
        "smooth5_vs_all_high_range": serving and [serving.min, serving.max],
        "router_overhead_frac": mlp["decode_overhead_frac"],
        "router_us_per_token": mlp["decode_us_per_token"],
        "router_prefill_overhead_frac": mlp["prefill_overhead_frac"],
        "router_prefill_us_per_token": mlp["prefill_us_per_token"],
        "costs": costs,
        "executor": bench.executor,
        "routers": {executor: sorted(kinds) for executor, kinds in bench.trained.items()},
        "compared": list(bench.compared),
        "sizes": asdict(bench.sizes),
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
    for name, folder in (("plots", args.plots), ("keep", args.keep)):
        if folder is not None and not folder.is_dir():
            parser.error(f"--{name} {folder}: there is no such folder: make it first")
    for name, count in (("--decode-batch", args.decode_batch), ("--turns", args.turns)):
        if count is not None and count < 1:
            parser.error(f"{name} must be at least 1, got {count}")
    sizes = QUICK if args.quick else Sizes()
    given = {"windows": args.windows, "decode_batch": args.decode_batch, "turns": args.turns}
    args.sizes = replace(sizes, **{name: of for name, of in given.items() if of is not None})
    return args


def _parser(description: str) -> argparse.ArgumentParser:
    parser = parser_for(description)
    parser.add_argument("--executor", choices=EXECUTORS, default=PLAIN, help="default: int8")
    add_text_options(parser, Sizes().windows)
    parser.add_argument(
        "--phases",
        nargs="+",
        choices=[phase.name.lower() for phase in Phase],
        default=[phase.name.lower() for phase in Phase],
        help="in which windows are run (default: both)",
    )
    parser.add_argument(
        "--compared",
        nargs="+",
        choices=COMPARED,
        help="routers that are judged beside the mlp, random, oracle and layerwise (default: all)",
    )
    parser.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="write a picture per text here"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="write here what each text showed, and do not measure again what lies there",
    )
    parser.add_argument(
        "--decode-batch",
        type=int,
        metavar="N",
        help=f"requests that decode together where throughput is timed (default: {Sizes().decode_batch})",
    )
    parser.add_argument(
        "--turns",
        type=int,
        metavar="N",
        help=f"of everything that is timed (default: {Sizes().turns}); more on a machine with neighbours",
    )
    parser.add_argument(
        "--only-costs", action="store_true", help="what a decision costs, without any text's KL"
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
        args.sizes,
        executor=args.executor,
        texts=args.texts,
        data_dir=args.data_dir,
        routers=args.routers,
        phases=[Phase[name.upper()] for name in dict.fromkeys(args.phases)],
        compared=args.compared,
    )
    provenance = provenance_of(model)
    found = run_costs(bench) if args.only_costs else run(bench, args.plots, args.keep)
    found |= {"quick": args.quick, "provenance": provenance}
    put_out(found, args.json, as_json=as_json)
