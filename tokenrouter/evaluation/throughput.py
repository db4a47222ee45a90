"""Throughput and latency of systems on the same requests, interleaved: drift hits all equally."""

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tokenrouter import LLM
from tokenrouter.engine import EngineStats
from tokenrouter.evaluation.clock import VirtualClock
from tokenrouter.evaluation.progress import Tick, progress
from tokenrouter.evaluation.shares import high_work
from tokenrouter.outputs import RequestMetrics, RequestOutput
from tokenrouter.scheduler import POLICIES
from tokenrouter.telemetry import Spread, percentiles, spread
from tokenrouter.workloads import RequestSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeat:
    """One pass of one system over all requests.

    Attributes:
        wall_s: busy time from the first request's arrival to the last token: gaps in which no request
            was there to work on are left out. Rates are over it.
        outputs: final outputs in the order of the requests.
        stats: the engine's counters of this pass.
        steps: one row per engine step, for steps.jsonl.
        high_frac: share of the work (tokens times layers) on the executor "high".
        idle_s: the gaps that were left out.
    """

    wall_s: float
    outputs: tuple[RequestOutput, ...]
    stats: EngineStats
    steps: tuple[dict[str, Any], ...]
    high_frac: float
    idle_s: float = 0.0

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last token, idle gaps included."""
        return self.wall_s + self.idle_s

    @property
    def output_tokens(self) -> int:
        """Generated tokens."""
        return sum(len(c.token_ids) for output in self.outputs for c in output.outputs)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens."""
        return sum(len(output.prompt_token_ids) for output in self.outputs)

    @property
    def requests(self) -> list[tuple[RequestMetrics, int]]:
        """Times and number of output tokens of every completion."""
        completions = [c for output in self.outputs for c in output.outputs]
        return [(c.metrics, len(c.token_ids)) for c in completions if c.metrics is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """All passes of one system."""

    repeats: tuple[Repeat, ...]

    @property
    def output_tok_s(self) -> Spread:
        """Generated tokens per second of busy time, as the next two."""
        return spread([r.output_tokens / r.wall_s for r in self.repeats])

    @property
    def total_tok_s(self) -> Spread:
        """Prompt and generated tokens per second."""
        return spread([(r.prompt_tokens + r.output_tokens) / r.wall_s for r in self.repeats])

    @property
    def requests_s(self) -> Spread:
        """Requests per second."""
        return spread([len(r.outputs) / r.wall_s for r in self.repeats])

    @property
    def busy_s(self) -> Spread:
        """Seconds of a pass without idle gaps."""
        return spread([r.wall_s for r in self.repeats])

    @property
    def makespan_s(self) -> Spread:
        """Seconds of a pass with them."""
        return spread([r.makespan_s for r in self.repeats])

    @property
    def high_frac(self) -> float:
        """Share of the work on the executor "high", mean over passes."""
        return sum(r.high_frac for r in self.repeats) / len(self.repeats)

    @property
    def peak_live_slots(self) -> int:
        """Most KV slots in use at once."""
        return max(r.stats.peak_live_slots for r in self.repeats)

    def latency(self) -> dict[str, dict[str, float] | None]:
        """TTFT, TPOT, ITL, end-to-end and queue times in ms, over the requests of all passes."""
        requests = [pair for repeat in self.repeats for pair in repeat.requests]
        times = [m for m, _ in requests]
        gaps = [zip(m.token_times_s[1:], m.token_times_s[:-1], strict=True) for m in times]
        return {
            "ttft_ms": percentiles(1e3 * (m.first_token_s - m.arrival_s) for m in times),
            "tpot_ms": percentiles(
                1e3 * (m.finished_s - m.first_token_s) / (n - 1) for m, n in requests if n > 1
            ),
            "itl_ms": percentiles(
                1e3 * (later - earlier) for gap in gaps for later, earlier in gap
            ),
            "e2e_ms": percentiles(1e3 * (m.finished_s - m.arrival_s) for m in times),
            "queue_ms": percentiles(1e3 * m.queue_s for m in times),
        }


def measure_throughput(
    systems: Mapping[str, LLM],
    requests: Sequence[RequestSpec],
    *,
    num_repeats: int,
    title: str = "throughput",
) -> dict[str, Throughput]:
    """Run every system ``num_repeats`` times: A B C, A B C, ... The caller has warmed them up.

    Args:
        systems: by name; their engines' counters start anew with each pass.
        requests: the same for all.
        num_repeats: passes of each system, at least 1.
        title: of the progress bar.

    Raises:
        ValueError: ``num_repeats`` is below 1, or an engine refused a request.
    """
    if num_repeats < 1:
        raise ValueError(f"evaluation.num_repeats must be at least 1, got {num_repeats}")
    passes: dict[str, list[Repeat]] = {name: [] for name in systems}
    total = num_repeats * len(systems) * num_tokens(requests)
    with progress(title, total, unit="tokens") as advance:
        for repeat in range(num_repeats):
            for name, llm in systems.items():
                tick = partial(advance, f"{name}, pass {repeat + 1}")
                passes[name].append(run_requests(llm, requests, tick))
    return {name: Throughput(repeats=tuple(repeats)) for name, repeats in passes.items()}


def num_tokens(requests: Sequence[RequestSpec]) -> int:
    """Prompt tokens and the most tokens that may be generated: the length of a pass's bar."""
    return sum(len(r.prompt_ids) + (r.params.max_tokens or 0) for r in requests)


def run_requests(llm: LLM, requests: Sequence[RequestSpec], tick: Tick | None = None) -> Repeat:
    """One pass: requests arrive at their times, in their order where at once; the engine steps until all are done.

    Time is virtual: computing takes as long as it takes, but when the engine has nothing to do the
    clock jumps to the next arrival. A request that arrives during a step joins after it, or waits
    outside while the engine's queue is full; its times count from its arrival. No request is there when
    the clock jumps, so the times of one request (its metrics, on the real clock) are real differences;
    times of two requests do not compare. Priorities count where the scheduler heeds them, as a baseline may not.

    Args:
        llm: its engine's counters start anew.
        requests: to serve.
        tick: called after each step with the prompt and generated tokens that it did, so that a
            pass without preemption and early ends sums to ``num_tokens``.

    Raises:
        ValueError: the engine refused a request.
    """
    engine = llm.engine
    heeds_priority = POLICIES[llm.options.scheduler].heeds_priority
    engine.stats.reset()
    engine.drop_prefixes()
    waiting = deque(sorted(enumerate(requests), key=lambda item: item[1].arrival_s))
    finished: dict[str, RequestOutput] = {}
    steps: list[dict[str, Any]] = []
    clock = VirtualClock(waiting[0][1].arrival_s if waiting else 0.0)
    while waiting or engine.has_unfinished():
        if not engine.has_unfinished():
            clock.skip_to(waiting[0][1].arrival_s)
        now_s = clock.now_s()
        while waiting and waiting[0][1].arrival_s <= now_s and not engine.scheduler.is_full:
            index, request = waiting.popleft()
            engine.add_request(
                str(index),
                list(request.prompt_ids),
                request.params,
                priority=request.priority if heeds_priority else 0,
                arrival_s=clock.real_s(request.arrival_s),
                stream=False,
            )
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        steps.append(_cumulative(engine.stats, clock.elapsed_s()))
        if tick is not None:
            tick(count=_done_tokens(steps[-1]) - (_done_tokens(steps[-2]) if steps[1:] else 0))
    busy_s = clock.elapsed_s() - clock.skipped_s
    outputs = tuple(finished[str(index)] for index in range(len(requests)))
    return make_repeat(llm, outputs, busy_s, _per_step(steps), idle_s=clock.skipped_s)


def make_repeat(
    llm: LLM,
    outputs: tuple[RequestOutput, ...],
    wall_s: float,
    steps: tuple[dict[str, Any], ...] = (),
    *,
    idle_s: float = 0.0,
) -> Repeat:
    """A pass that has just ended, with the engine's counters since its last reset."""
    high, executed = high_work(llm)
    return Repeat(
        wall_s=wall_s,
        outputs=outputs,
        stats=copy.deepcopy(llm.engine.stats),
        steps=steps,
        high_frac=high / executed,
        idle_s=idle_s,
    )


_COUNTERS = (
    "prefill_tokens",
    "decode_tokens",
    "output_tokens",
    "decided_tokens",
    "num_preemptions",
)
_TIMES = ("step_s", "schedule_s", "router_s", "executor_s", "sampler_s", "memory_s")


def _cumulative(stats: EngineStats, end_s: float) -> dict[str, Any]:
    return {"end_s": end_s} | {name: getattr(stats, name) for name in (*_COUNTERS, *_TIMES)}


def _done_tokens(row: Mapping[str, Any]) -> int:
    return int(row["prefill_tokens"] + row["output_tokens"])


def _per_step(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Differences of cumulative rows; times in ms."""
    result = []
    before: dict[str, Any] = dict.fromkeys((*_COUNTERS, *_TIMES), 0)
    for step, row in enumerate(rows):
        counts = {name: row[name] - before[name] for name in _COUNTERS}
        times = {
            name.removesuffix("_s") + "_ms": round(1e3 * (row[name] - before[name]), 4)
            for name in _TIMES
        }
        result.append({"step": step, "end_ms": round(1e3 * row["end_s"], 4)} | counts | times)
        before = row
    return tuple(result)
