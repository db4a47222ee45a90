"""Arguments, the table and its JSON object."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tokenrouter.evaluation.bench import check_least, parser_for, put_out
from tokenrouter.kernels import KernelSet, NativeKernels, ReferenceKernels, select
from tokenrouter.telemetry import Provenance, collect_provenance

from .attention import attention_cases
from .case import LIBRARY, NATIVE, REFERENCE, SEPARATE, Case, Result, measure
from .layer import layer_cases
from .machine import measure_machine
from .products import product_cases
from .roofline import Machine
from .routed import routed_cases
from .rows import row_cases
from .shapes import QUICK, Shapes, Sizes, parse_shapes

Cases = Callable[..., Iterator[Case]]
FAMILIES: dict[str, Cases] = {
    "rows": row_cases,
    "products": product_cases,
    "routed": routed_cases,
    "attention": attention_cases,
    "layer": layer_cases,
}
OTHERS = (REFERENCE, LIBRARY, SEPARATE)


def parse_arguments(description: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, and ``shapes``: the model's.

    Args:
        description: of the script, for ``--help``.
        arguments: None: the command line's.

    Raises:
        SystemExit: an option that does not exist or is out of its range, which stderr then names.
    """
    parser = parser_for(description)
    parser.add_argument("--repeats", type=int, default=7, help="turns that count")
    parser.add_argument("--threads", type=int, help="of torch; all cores by default")
    parser.add_argument("--cached", action="store_true", help="the same weights and KV each call")
    parser.add_argument(
        "--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="operators to run"
    )
    parser.add_argument(
        "--model-shapes",
        default="576,1536,9,3,64",
        metavar="H,I,Q,G,D",
        help="hidden,inter,heads,kv_heads,head_dim; SmolLM2-135M by default",
    )
    parser.add_argument("--vocab", type=int, default=49152, help="outputs of lm_head")
    parser.add_argument("--layers", type=int, default=30, help="weights of so many layers rotate")
    found = parser.parse_args(arguments)
    try:
        found.shapes = parse_shapes(found.model_shapes, vocab=found.vocab, layers=found.layers)
    except ValueError as error:
        parser.error(str(error))
    check_least(parser, found, 1, "repeats", "threads")
    return found


def all_cases(
    backends: Sequence[KernelSet],
    shapes: Shapes,
    sizes: Sizes,
    *,
    cached: bool,
    only: Sequence[str] = tuple(FAMILIES),
) -> Iterator[Case]:
    """One after the other, so that only one operator's weights are in memory."""
    for name in only:
        yield from FAMILIES[name](backends, shapes, sizes, cached=cached)


def head() -> str:
    """The table's head; times are in microseconds per call."""
    columns = "".join(f"{name:>11s}" for name in OTHERS)
    return (
        f"{'operator':19s}{'size':52s}{'native us':>11s} {'[min .. max]':23s}{columns}"
        f"{'roofline':>11s}{'share %':>9s}  bound by"
    )


def line(result: Result) -> str:
    """A row of the table: medians; native with its smallest and largest; what does not exist is ``-``."""
    native = result.seconds[NATIVE]
    bounds = f"[{native.min * 1e6:.1f} .. {native.max * 1e6:.1f}]"
    others = "".join(
        f"{result.seconds[name].median * 1e6:11.1f}" if name in result.seconds else f"{'-':>11s}"
        for name in OTHERS
    )
    return (
        f"{result.operator:19s}{result.size:52s}{native.median * 1e6:11.1f} {bounds:23s}{others}"
        f"{result.roofline.seconds * 1e6:11.1f}{100 * result.roofline_frac:9.1f}  {result.roofline.bound}"
    )


def run(
    native: NativeKernels, arguments: argparse.Namespace, provenance: Provenance
) -> dict[str, Any]:
    """Measures the machine, then every case; prints the table as it grows."""
    sizes: Sizes = QUICK if arguments.quick else Sizes()
    machine: Machine = measure_machine(native, sizes, provenance)
    print("\n".join(machine.lines()), flush=True)
    print(f"\n{head()}", flush=True)
    results: list[Result] = []
    for case in all_cases(
        [native, ReferenceKernels()],
        arguments.shapes,
        sizes,
        cached=arguments.cached,
        only=arguments.only,
    ):
        results.append(measure(case, machine, turn_s=sizes.turn_s, repeats=arguments.repeats))
        print(line(results[-1]), flush=True)
    return {
        "machine": machine.as_dict(),
        "results": [result.as_dict() for result in results],
        "model_shapes": arguments.model_shapes,
        "vocab": arguments.vocab,
        "layers": arguments.layers,
        "cached": arguments.cached,
        "repeats": arguments.repeats,
        "quick": arguments.quick,
        "provenance": provenance.as_dict(),
    }


def main(description: str, arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark; ``arguments`` are the command line's unless given."""
    found = parse_arguments(description, arguments)
    if found.threads is not None:
        torch.set_num_threads(found.threads)
    torch.manual_seed(0)
    native = select("native")
    assert isinstance(native, NativeKernels)
    provenance = collect_provenance(seed=0, model="random weights", model_hash="none")
    with torch.inference_mode():
        found_all = run(native, found, provenance)
    put_out(found_all)
