"""The same requests under memory pressure, by every way to preempt."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from tokenrouter import LLM
from tokenrouter.evaluation.throughput import Repeat, Throughput, measure_throughput, run_requests
from tokenrouter.telemetry import Spread, spread

from .setup import ALWAYS, BY_COST, NEVER, Bench, Load

WARM_UP_TOKENS = 4
TITLE = (
    f"{'engine':<10}{'output tok/s':>24}{'preempted':>11}{'out':>6}{'in':>6}{'recomputed':>12}"
    f"{'tokens again':>14}{'copies s':>10}{'host MB':>9}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """One load in one form of entries, by the names of ``VARIANTS``."""

    load: Load
    form: str
    passes: Mapping[str, Throughput]

    def by_cost_vs(self, other: str) -> Spread:
        """Output tok/s of by_cost over that of ``other``, pass by pass."""
        own, theirs = (self.passes[name].repeats for name in (BY_COST, other))
        return spread([_tok_s(a) / _tok_s(b) for a, b in zip(own, theirs, strict=True)])

    @property
    def better_fixed(self) -> str:
        """Whichever of never and always has the better median."""
        return max((NEVER, ALWAYS), key=lambda name: self.passes[name].output_tok_s.median)

    def as_values(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "load": asdict(self.load),
            "form": self.form,
            "better_fixed": self.better_fixed,
            "by_cost_vs_fixed": asdict(self.by_cost_vs(self.better_fixed)),
            "by_cost_vs_never": asdict(self.by_cost_vs(NEVER)),
            "by_cost_vs_always": asdict(self.by_cost_vs(ALWAYS)),
            "engines": {name: row(served) for name, served in self.passes.items()},
        }


def serve(bench: Bench, load: Load, form: str) -> Served:
    """Passes of the three engines in turns, after a short one of each."""
    requests, systems = bench.requests(load), bench.systems(load, form)
    for llm in systems.values():
        _warm_up(llm, bench, load)
    passes = measure_throughput(
        systems, requests, num_repeats=bench.repeats, title=f"{load.context} {form}"
    )
    return Served(load=load, form=form, passes=passes)


def row(served: Throughput) -> dict[str, Any]:
    """Rates as median, smallest and largest, counts and seconds as medians over the passes."""
    stats = [repeat.stats for repeat in served.repeats]
    counts = {
        "preemptions": [s.num_preemptions for s in stats],
        "swaps_out": [s.swaps.num_out for s in stats],
        "swaps_in": [s.swaps.num_in for s in stats],
        "recomputes": [s.num_recomputes for s in stats],
        "recomputed_tokens": [s.reused_tokens for s in stats],
        "copy_s": [s.swaps.copy_s for s in stats],
        "host_peak_bytes": [s.swaps.peak_bytes for s in stats],
    }
    return {
        "output_tok_s": asdict(served.output_tok_s),
        **{name: median(values) for name, values in counts.items()},
    }


def format_served(served: Served) -> str:
    """The table, and by_cost against the better of the two others."""
    load = served.load
    lines = [
        f"\n{load.num_requests} requests of {load.context:,} tokens in, {load.output_min} to {load.output_max} out, "
        f"{load.num_slots:,} slots, entries in {served.form}; counts are medians of passes",
        TITLE,
        *(_line(name, row(passes)) for name, passes in served.passes.items()),
    ]
    value = served.by_cost_vs(served.better_fixed)
    lines.append(
        f"  by_cost has {value.median:.3f} [{value.min:.3f}, {value.max:.3f}] times the output tok/s of "
        f"{served.better_fixed}, the better of the two others."
    )
    return "\n".join(lines)


def _line(name: str, found: Mapping[str, Any]) -> str:
    rate = Spread(**found["output_tok_s"])
    return (
        f"{name:<10}{f'{rate.median:.1f} [{rate.min:.1f}, {rate.max:.1f}]':>24}"
        f"{found['preemptions']:>11g}{found['swaps_out']:>6g}{found['swaps_in']:>6g}"
        f"{found['recomputes']:>12g}{found['recomputed_tokens']:>14g}{found['copy_s']:>10.3f}"
        f"{found['host_peak_bytes'] / 1e6:>9.1f}"
    )


def _warm_up(llm: LLM, bench: Bench, load: Load) -> None:
    first = bench.requests(load)[: load.num_fitting]
    run_requests(
        llm, [replace(r, params=replace(r.params, max_tokens=WARM_UP_TOKENS)) for r in first]
    )


def _tok_s(repeat: Repeat) -> float:
    return repeat.output_tokens / repeat.wall_s
