"""Passes of both engines over the same requests, and what sharing saves."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tokenrouter.evaluation.throughput import (
    Repeat,
    Throughput,
    measure_throughput,
    run_requests,
)
from tokenrouter.telemetry import spread

from .setup import PLAIN, SHARED, Bench

Numbers = Mapping[str, Sequence[float]]
RATIOS = ("forward_s", "ttft_ms_p50", "ttft_ms_p99", "output_tok_s", "peak_live_bytes")
COLUMNS = {
    "forward_s": ("forwards s", 1.0, 2),
    "ttft_ms_p50": ("TTFT p50 ms", 1.0, 0),
    "ttft_ms_p99": ("TTFT p99 ms", 1.0, 0),
    "output_tok_s": ("output tok/s", 1.0, 1),
    "peak_live_bytes": ("peak KV MB", 1e-6, 1),
    "shared_tokens": ("shared tokens", 1.0, 0),
}
"""By key of a pass its title, the factor to the title's unit, and digits."""


def measure(bench: Bench) -> dict[str, Numbers]:
    """By engine its numbers by key, one value per turn. Every engine serves all requests once before."""
    for llm in bench.systems.values():
        run_requests(llm, bench.requests)
    served = measure_throughput(
        bench.systems, bench.requests, num_repeats=bench.repeats, title="prefixes"
    )
    return {name: _by_key(found.repeats) for name, found in served.items()}


def as_values(found: Mapping[str, Numbers]) -> dict[str, Any]:
    """Plain values: medians with their ranges by engine, and the ratios of shared over plain, turn by turn."""
    ratios = {
        key: spread([a / b for a, b in zip(found[SHARED][key], found[PLAIN][key], strict=True)])
        for key in RATIOS
    }
    return {
        **{f"prefix_{key}_vs_plain": ratio.median for key, ratio in ratios.items()},
        "shared_tokens": spread(found[SHARED]["shared_tokens"]).median,
        "ranges": {
            f"prefix_{key}_vs_plain": [ratio.min, ratio.max] for key, ratio in ratios.items()
        },
        "systems": {
            name: {key: asdict(spread(values)) for key, values in numbers.items()}
            for name, numbers in found.items()
        },
    }


def format_found(found: Mapping[str, Numbers]) -> str:
    """A table with a line per engine and one of ratios: medians [smallest, largest]."""
    values = as_values(found)
    width = 26
    lines = [f"{'':<10}" + "".join(f"{title:>{width}}" for title, *_ in COLUMNS.values())]
    for name, numbers in values["systems"].items():
        cells = [
            _cell(*(factor * numbers[key][part] for part in ("median", "min", "max")), digits)
            for key, (_, factor, digits) in COLUMNS.items()
        ]
        lines.append(f"{name:<10}" + "".join(f"{cell:>{width}}" for cell in cells))
    ratios = [
        _cell(values[claim], *values["ranges"][claim], 2) if claim in values else ""
        for claim in (f"prefix_{key}_vs_plain" for key in COLUMNS)
    ]
    return "\n".join([*lines, f"{'ratio':<10}" + "".join(f"{cell:>{width}}" for cell in ratios)])


def _by_key(repeats: Sequence[Repeat]) -> Numbers:
    passes = [_numbers(repeat) for repeat in repeats]
    return {key: [numbers[key] for numbers in passes] for key in COLUMNS}


def _numbers(repeat: Repeat) -> dict[str, float]:
    alone = Throughput(repeats=(repeat,))
    ttft = alone.latency()["ttft_ms"]
    assert ttft is not None, "a pass without requests"
    return {
        "forward_s": repeat.stats.executor_s,
        "ttft_ms_p50": ttft["p50"],
        "ttft_ms_p99": ttft["p99"],
        "output_tok_s": alone.output_tok_s.median,
        "peak_live_bytes": repeat.stats.peak_live_bytes,
        "shared_tokens": repeat.stats.shared_tokens,
    }


def _cell(median: float, smallest: float, largest: float, digits: int) -> str:
    return f"{median:,.{digits}f} [{smallest:,.{digits}f}, {largest:,.{digits}f}]"
