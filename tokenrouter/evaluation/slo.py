"""Goodput: requests that meet a service level objective on time to first token and time per output token.

The idea and the name are DistServe's (Zhong et al. 2024, arXiv:2401.09670). The default limits are multiples of what
the same engine needs for a prompt of that length when it has nothing else to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from tokenrouter import LLM
from tokenrouter.checks import check_size
from tokenrouter.evaluation.progress import progress
from tokenrouter.evaluation.throughput import Repeat, Throughput, run_requests
from tokenrouter.outputs import RequestMetrics
from tokenrouter.sampling_params import SamplingParams
from tokenrouter.workloads import RequestSpec

PROBE_LENGTHS = 5
PROBE_OUTPUT_TOKENS = 12
PROBE_REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SLOOptions:
    """The limits, relative or fixed.

    Args:
        ttft_scale: time to first token, in multiples of the unloaded one of the same prompt length.
        tpot_scale: time per output token, likewise.
        ttft_ms, tpot_ms: fixed limits in their place; None: relative.

    Raises:
        ValueError: a scale or a limit that is no positive number.
    """

    ttft_scale: float = 4.0
    tpot_scale: float = 2.0
    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_scale", "tpot_scale", "ttft_ms", "tpot_ms"):
            value = getattr(self, name)
            if value is not None or name.endswith("_scale"):
                check_size(f"evaluation.slo.{name}", value)

    @property
    def is_relative(self) -> bool:
        """Whether any limit depends on unloaded times."""
        return self.ttft_ms is None or self.tpot_ms is None


class Unloaded(NamedTuple):
    """Median times of one request alone on the engine, with a prompt of this length."""

    prompt_tokens: int
    ttft_ms: float
    tpot_ms: float


class Limits(NamedTuple):
    """What one request must not exceed."""

    ttft_ms: float
    tpot_ms: float


class Goodput(NamedTuple):
    """Share of the requests of all passes that meet both limits; such requests per second of makespan, median."""

    frac: float
    requests_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SLO:
    """Options with the unloaded times that they refer to.

    Args:
        options: scales and fixed limits.
        unloaded: by growing prompt length; may be empty where both limits are fixed.

    Raises:
        ValueError: a relative limit without unloaded times.
    """

    options: SLOOptions
    unloaded: tuple[Unloaded, ...] = ()

    def __post_init__(self) -> None:
        if self.options.is_relative and not self.unloaded:
            raise ValueError(
                "a relative SLO needs unloaded times: measure them (measure_unloaded), or set both "
                "evaluation.slo.ttft_ms and evaluation.slo.tpot_ms"
            )

    def limits(self, prompt_tokens: int) -> Limits:
        """The limits for a prompt of this length: interpolated, and constant outside the measured lengths."""
        options = self.options
        return Limits(
            options.ttft_ms or options.ttft_scale * self._at(prompt_tokens, "ttft_ms"),
            options.tpot_ms or options.tpot_scale * self._at(prompt_tokens, "tpot_ms"),
        )

    def is_met(self, times: RequestMetrics, *, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether a request met both; one of a single output token has no time per output token to meet."""
        limits = self.limits(prompt_tokens)
        gaps = output_tokens - 1
        tpot_s = (times.finished_s - times.first_token_s) / gaps if gaps else 0.0
        ttft_s = times.first_token_s - times.arrival_s
        return 1e3 * ttft_s <= limits.ttft_ms and 1e3 * tpot_s <= limits.tpot_ms

    def goodput(self, served: Throughput) -> Goodput:
        """Goodput of one system."""
        good = [self._num_good(repeat) for repeat in served.repeats]
        total = sum(len(repeat.outputs) for repeat in served.repeats)
        rates = [n / repeat.makespan_s for n, repeat in zip(good, served.repeats, strict=True)]
        return Goodput(sum(good) / total, median(rates))

    def section(self) -> dict[str, Any]:
        """``latency.slo`` of metrics.json: the limits that hold, and the curve that they refer to."""
        options = self.options
        fixed = {name: getattr(options, name) for name in ("ttft_ms", "tpot_ms")}
        section: dict[str, Any] = {
            name.replace("_ms", "_scale"): getattr(options, name.replace("_ms", "_scale"))
            for name, limit in fixed.items()
            if limit is None
        }
        section |= {name: limit for name, limit in fixed.items() if limit is not None}
        if options.is_relative:
            section["unloaded"] = {
                name: [getattr(point, name) for point in self.unloaded] for name in Unloaded._fields
            }
        return section

    def _at(self, prompt_tokens: int, name: str) -> float:
        lengths = [point.prompt_tokens for point in self.unloaded]
        return float(np.interp(prompt_tokens, lengths, [getattr(p, name) for p in self.unloaded]))

    def _num_good(self, repeat: Repeat) -> int:
        return sum(
            self.is_met(
                completion.metrics,
                prompt_tokens=len(output.prompt_token_ids),
                output_tokens=len(completion.token_ids),
            )
            for output in repeat.outputs
            for completion in output.outputs
            if completion.metrics is not None
        )


def measure_slo(options: SLOOptions, llm: LLM, requests: Sequence[RequestSpec]) -> SLO:
    """The SLO of a run; unloaded times are measured only where a limit refers to them.

    Args:
        options: conf/evaluation, ``slo``.
        llm: all_high, warm and with nothing to do.
        requests: the workload.
    """
    unloaded = measure_unloaded(llm, requests) if options.is_relative else ()
    return SLO(options=options, unloaded=unloaded)


def measure_unloaded(llm: LLM, requests: Sequence[RequestSpec]) -> tuple[Unloaded, ...]:
    """Time to first token and per output token of one request at a time, over the workload's prompt lengths.

    At most five lengths from its shortest prompt to its longest, in equal ratios; of each the median of
    three requests of 12 output tokens. A prompt is the longest one's, rotated and cut, so that no two
    begin alike.

    Args:
        llm: warm and with nothing to do; its engine's counters start anew.
        requests: the workload.
    """
    limit = min(llm.model.config.max_model_len, llm.engine.pool.num_slots) - PROBE_OUTPUT_TOKENS
    lengths = probe_lengths([len(r.prompt_ids) for r in requests], max(limit, 1))
    longest = max((r.prompt_ids for r in requests), key=len)
    params = SamplingParams(temperature=0.0, max_tokens=PROBE_OUTPUT_TOKENS, ignore_eos=True)
    points, shift = [], 0
    with progress("unloaded times", len(lengths) * PROBE_REPEATS, unit="requests") as advance:
        for length in lengths:
            latencies = []
            for _ in range(PROBE_REPEATS):
                shift = (shift + 1) % len(longest)
                ids = (*longest[shift:], *longest[:shift])[:length]
                probe = RequestSpec(prompt_ids=ids, params=params)
                latencies.append(Throughput(repeats=(run_requests(llm, [probe]),)).latency())
                advance(f"{length} tokens")
            ttft_ms, tpot_ms = (
                median(found["mean"] for times in latencies if (found := times[name]) is not None)
                for name in ("ttft_ms", "tpot_ms")
            )
            points.append(Unloaded(length, ttft_ms, tpot_ms))
    return tuple(points)


def probe_lengths(prompt_lengths: Sequence[int], limit: int) -> list[int]:
    """At most five lengths from the shortest to the longest prompt, in equal ratios, none over ``limit``."""
    low, high = min(*prompt_lengths, limit), min(max(prompt_lengths), limit)
    return sorted({round(length) for length in np.geomspace(low, high, PROBE_LENGTHS).tolist()})
