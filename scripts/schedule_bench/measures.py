"""Passes of every system over every workload, and what the token level gains over the better static batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from tokenrouter.evaluation.progress import progress
from tokenrouter.evaluation.systems import WARM_UP_TOKENS
from tokenrouter.evaluation.throughput import (
    Repeat,
    Throughput,
    measure_throughput,
    num_tokens,
    run_requests,
)
from tokenrouter.telemetry import Spread, spread
from tokenrouter.workloads import RequestSet, RequestSpec

from .setup import TOKEN_LEVEL, Bench, arriving

HIGHER_IS_BETTER = ("output_tok_s", "requests_s")
LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms")
PERCENTILES = ("p50", "p99")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """A system's number over that of the better static batch.

    Attributes:
        baseline: the static batch whose median is better, of those of one size.
        value: pass by pass.
        pays: every pass of the system is better than every pass of the baseline, and not by noise alone.
    """

    baseline: str
    value: Spread
    pays: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """One workload, served by every system.

    Attributes:
        numbers: by system, one dict per pass: ``output_tok_s`` and ``requests_s``, over busy time, and percentiles over
            the requests of the pass, such as ``ttft_ms_p99``.
        baselines: by the size of their batches, the default first, the static systems in ``numbers``.
        is_uniform: equal requests that arrive at once.
        rate_requests_s: of the arrivals; None where all requests arrive at once.
    """

    name: str
    requests: Sequence[RequestSpec]
    numbers: Mapping[str, Sequence[Mapping[str, float]]]
    baselines: Mapping[int, Sequence[str]]
    is_uniform: bool
    rate_requests_s: float | None = None

    def of(self, system: str, key: str) -> list[float]:
        """A number of every pass of ``system``."""
        return [values[key] for values in self.numbers[system]]

    @property
    def static_batch(self) -> int:
        """The default size of static batches."""
        return next(iter(self.baselines))

    def is_one_batch(self, batch: int) -> bool:
        """Whether all requests are equal, arrive at once and fit one static batch: there is nothing to schedule."""
        return self.is_uniform and len(self.requests) <= batch

    def ratio(self, key: str, system: str = TOKEN_LEVEL, *, batch: int | None = None) -> Ratio:
        """``system`` over whichever static order has the better median of ``key``: no weak baseline.

        Args:
            key: of ``numbers``.
            system: whose number is divided.
            batch: size of the static batches; None: the default one.
        """
        batch = self.static_batch if batch is None else batch
        sign = 1.0 if key in HIGHER_IS_BETTER else -1.0
        baseline = max(self.baselines[batch], key=lambda name: sign * median(self.of(name, key)))
        own, theirs = self.of(system, key), self.of(baseline, key)
        is_better = min(sign * a for a in own) > max(sign * b for b in theirs)
        return Ratio(
            baseline=baseline,
            value=spread([a / b for a, b in zip(own, theirs, strict=True)]),
            pays=is_better and not self.is_one_batch(batch),
        )


def warm_up(bench: Bench) -> None:
    """Short outputs for mixed_lengths on every system."""
    requests = [
        replace(r, params=replace(r.params, max_tokens=WARM_UP_TOKENS))
        for r in bench.requests["mixed_lengths"]
    ]
    with progress("warm-up", len(bench.systems) * num_tokens(requests), unit="tokens") as advance:
        for name, llm in bench.systems.items():
            run_requests(llm, requests, partial(advance, name))


def serve_at_once(bench: Bench, name: str) -> Served:
    """Every system on a workload of ``bench.requests``, in turns."""
    return _serve(bench, name, bench.requests[name])


def serve_poisson(bench: Bench, crowd: Served) -> Served:
    """The requests of ``crowd``, arriving at a share of the rate at which the token level served them."""
    rate = bench.sizes.load_frac * median(crowd.of(TOKEN_LEVEL, "requests_s"))
    return _serve(bench, "poisson", arriving(crowd.requests, rate), rate_requests_s=rate)


def _serve(
    bench: Bench,
    name: str,
    requests: Sequence[RequestSpec],
    *,
    rate_requests_s: float | None = None,
) -> Served:
    served = measure_throughput(bench.systems, requests, num_repeats=bench.repeats, title=name)
    return Served(
        name=name,
        requests=requests,
        numbers={system: [_numbers(r) for r in t.repeats] for system, t in served.items()},
        baselines=bench.sizes.baselines,
        is_uniform=RequestSet(requests=tuple(requests)).is_uniform,
        rate_requests_s=rate_requests_s,
    )


def _numbers(repeat: Repeat) -> dict[str, float]:
    alone = Throughput(repeats=(repeat,))
    latency = alone.latency()
    return {
        "output_tok_s": alone.output_tok_s.median,
        "requests_s": alone.requests_s.median,
        **{
            f"{name}_{percentile}": values[percentile]
            for name in LATENCIES
            if (values := latency[name]) is not None
            for percentile in PERCENTILES
        },
    }
