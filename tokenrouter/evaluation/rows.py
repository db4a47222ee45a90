"""One row per system: what tables and plots are drawn from, saved as systems.json."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tokenrouter.evaluation.generations import GenerationMatch
from tokenrouter.evaluation.quality import Quality
from tokenrouter.evaluation.slo import SLO
from tokenrouter.evaluation.throughput import Throughput
from tokenrouter.telemetry import Spread

SPREADS, SPREAD = ("output_tok_s", "total_tok_s"), ("median", "min", "max")
"""Fields that are of several passes, and what each then holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemRow:
    """One system's numbers; None where a task did not measure them.

    Attributes:
        name: all_high, all_low, request_level, static_batch, or the chosen router's name.
        chosen: this is the router that the run is about.
        num_passes: over the requests, that the rates are of.
        num_windows: that ``kl_stderr_nats`` is over.
        high_frac: share of tokens on the route "high" while serving the requests: what throughput
            belongs to.
        preemptions, swaps_out: requests that lost their slots, and those of them that the host tier kept; most of any
            pass, as the next.
        recomputed_tokens: tokens that ran again.
        same_output_frac, common_tokens_mean, length_ratio, chrf: its texts beside all_high's, see
            GenerationMatch; None of all_high itself.
        eval_high_frac: share of high work in forced prefill of the windows: what KL belongs to.
        eval_decode_high_frac: the same in forced decode.
    """

    name: str
    chosen: bool
    output_tok_s: Spread | None = None
    total_tok_s: Spread | None = None
    num_passes: int | None = None
    goodput_frac: float | None = None
    goodput_requests_s: float | None = None
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    kv_peak_live_bytes: int | None = None
    preemptions: int | None = None
    swaps_out: int | None = None
    recomputed_tokens: int | None = None
    high_frac: float | None = None
    same_output_frac: float | None = None
    common_tokens_mean: float | None = None
    length_ratio: float | None = None
    chrf: float | None = None
    kl_mean_nats: float | None = None
    kl_stderr_nats: float | None = None
    num_windows: int | None = None
    kl_decode_nats: float | None = None
    ppl: float | None = None
    ppl_rel_pct: float | None = None
    top1_agreement_frac: float | None = None
    eval_high_frac: float | None = None
    eval_decode_high_frac: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SystemRow":
        """What ``as_dict`` gave; names that no row has are left out.

        Raises:
            ValueError: no mapping, a value that no row has, or no name.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"a system must be a mapping, got {values!r}")
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        for name, value in known.items():
            if name in SPREADS and value is not None:
                parts = value if isinstance(value, Mapping) else {}
                known[name] = Spread(**{key: _number(name, parts.get(key)) for key in SPREAD})
            elif name != "name" and value is not None:
                _number(name, value)
        if not isinstance(known.get("name"), str):
            raise ValueError(f"a system's name must be text, got {known.get('name')!r}")
        return cls(**{"chosen": False} | known)


def _number(name: str, value: Any) -> float:
    is_flag = isinstance(value, bool) and name in SPREADS
    if is_flag or not is_finite_number(value):
        raise ValueError(f"a system's {name} must be a number, got {value!r}")
    number: float = value
    return number


def is_finite_number(value: Any) -> bool:
    """Whether ``value`` is an int or a float that a float can hold, no NaN and no infinity."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False


def make_row(
    name: str,
    *,
    chosen: bool,
    throughput: Throughput | None,
    slo: SLO | None,
    match: GenerationMatch | None,
    quality: Quality | None,
    reference_ppl: float | None,
) -> SystemRow:
    """Gather what was measured of one system."""
    values: dict[str, Any] = {}
    if throughput is not None:
        latency, stats = throughput.latency(), [r.stats for r in throughput.repeats]
        most = max(stats, key=lambda s: s.num_preemptions)
        values |= {
            "output_tok_s": throughput.output_tok_s,
            "total_tok_s": throughput.total_tok_s,
            "num_passes": len(throughput.repeats),
            "ttft_p50_ms": (latency["ttft_ms"] or {}).get("p50"),
            "ttft_p99_ms": (latency["ttft_ms"] or {}).get("p99"),
            "itl_p50_ms": (latency["itl_ms"] or {}).get("p50"),
            "itl_p99_ms": (latency["itl_ms"] or {}).get("p99"),
            "kv_peak_live_bytes": max(s.peak_live_bytes for s in stats),
            "preemptions": most.num_preemptions,
            "swaps_out": most.swaps.num_out,
            "recomputed_tokens": most.reused_tokens,
            "high_frac": throughput.high_frac,
        }
        if slo is not None:
            goodput = slo.goodput(throughput)
            values |= {
                "goodput_frac": goodput.frac,
                "goodput_requests_s": goodput.requests_s,
            }
    if match is not None:
        names = ("same_output_frac", "common_tokens_mean", "length_ratio", "chrf")
        values |= {key: getattr(match, key) for key in names}
    if quality is not None and reference_ppl is not None:
        values |= {
            "kl_mean_nats": quality.prefill.kl_mean_nats,
            "kl_stderr_nats": quality.prefill.kl_stderr_nats,
            "num_windows": quality.prefill.num_windows,
            "kl_decode_nats": quality.decode.kl_mean_nats if quality.decode else None,
            "ppl": quality.prefill.ppl,
            "ppl_rel_pct": 100.0 * (quality.prefill.ppl / reference_ppl - 1.0),
            "top1_agreement_frac": quality.prefill.top1_agreement_frac,
            "eval_high_frac": quality.high_frac,
            "eval_decode_high_frac": quality.decode_high_frac,
        }
    return SystemRow(name=name, chosen=chosen, **values)
