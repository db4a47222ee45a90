"""Speed ratios of systems in one process: they take turns, so that drift hits all equally."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from tokenrouter import LLM, SamplingParams
from tokenrouter.engine import EngineStats
from tokenrouter.evaluation.progress import progress
from tokenrouter.evaluation.throughput import run_requests
from tokenrouter.telemetry import Spread, spread
from tokenrouter.workloads import RequestSpec

Timed = Callable[[], float]


def take_turns(runs: Mapping[str, Timed], repeats: int, *, title: str) -> dict[str, list[float]]:
    """Seconds that each run returns, A B C, A B C, ..., after one turn that does not count.

    Args:
        runs: by name; each does its work and returns the seconds that count.
        repeats: turns of each, at least 1.
        title: of the progress bar.

    Raises:
        ValueError: ``repeats`` is below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with progress(title, (repeats + 1) * len(runs), unit="runs") as advance:
        for turn in range(repeats + 1):
            for name, run in runs.items():
                needed_s = run()
                if turn:
                    seconds[name].append(needed_s)
                advance(name)
    return seconds


def speed_ratio(seconds: Mapping[str, Sequence[float]], name: str, other: str) -> Spread:
    """How many times as fast ``name`` is as ``other``, turn by turn: median, smallest, largest."""
    return spread([theirs / own for own, theirs in zip(seconds[name], seconds[other], strict=True)])


def prefill_s(llm: LLM, ids: Sequence[int]) -> float:
    """Seconds from handing over a prompt to its first token."""
    started = time.perf_counter()
    llm.generate([list(ids)], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    return time.perf_counter() - started


class DecodeBatch:
    """Requests that are past their prompts and decode together, a stretch of steps at a time.

    Used as a context: entering runs the prompts, leaving aborts the requests.

    Args:
        llm: an engine with nothing else to do.
        prompts: one request each; all must fit in at once.
        num_steps: of a stretch.
    """

    def __init__(self, llm: LLM, prompts: Sequence[Sequence[int]], *, num_steps: int) -> None:
        self._engine = llm.engine
        self._prompts = prompts
        self._num_steps = num_steps

    def __enter__(self) -> "DecodeBatch":
        params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, detokenize=False)
        engine = self._engine
        for row, prompt in enumerate(self._prompts):
            engine.add_request(_request_id(row), list(prompt), params, stream=False)
        with progress("prompts", sum(map(len, self._prompts)), unit="tokens") as advance:
            while engine.scheduler.waiting or any(
                r.num_computed < r.prompt_len for r in engine.scheduler.running
            ):
                before = engine.stats.prefill_tokens
                engine.step()
                advance(count=engine.stats.prefill_tokens - before)
        return self

    def __exit__(self, *_: object) -> None:
        for row in range(len(self._prompts)):
            self._engine.abort(_request_id(row), silent=True)

    def stretch_s(self) -> float:
        """Runs a stretch; returns the seconds in which each request gets one token.

        In queued dispatch a step may leave requests waiting, so tokens are counted, not steps.
        """
        before = self._engine.stats.output_tokens
        started = time.perf_counter()
        for _ in range(self._num_steps):
            self._engine.step()
        elapsed_s = time.perf_counter() - started
        return elapsed_s * len(self._prompts) / (self._engine.stats.output_tokens - before)


def serve_runs(llms: Mapping[str, LLM], requests: Sequence[RequestSpec]) -> dict[str, Timed]:
    """A pass over the requests on each system, for ``take_turns``."""

    def serve_s(llm: LLM) -> float:
        return run_requests(llm, requests).wall_s

    return {name: partial(serve_s, llm) for name, llm in llms.items()}


def prefill_runs(llms: Mapping[str, LLM], ids: Sequence[int]) -> dict[str, Timed]:
    """``prefill_s`` of the same prompt on each system, for ``take_turns``."""
    return {name: partial(prefill_s, llm, ids) for name, llm in llms.items()}


def decode_turns(
    llms: Mapping[str, LLM],
    prompts: Sequence[Sequence[int]],
    repeats: int,
    *,
    num_steps: int,
    title: str,
) -> dict[str, list[float]]:
    """``take_turns`` with a stretch of decode on each system, all at the same context.

    Args:
        llms: by name; each runs the prompts once and then decodes its own batch.
        prompts: one request each; all must fit in at once.
        repeats: turns that count, ``num_steps`` steps each.
        num_steps: of a turn.
        title: of the progress bar.
    """
    with ExitStack() as stack:
        batches = {
            name: stack.enter_context(DecodeBatch(llm, prompts, num_steps=num_steps))
            for name, llm in llms.items()
        }
        runs = {name: batch.stretch_s for name, batch in batches.items()}
        return take_turns(runs, repeats, title=title)


def format_rates(title: str, seconds: Mapping[str, Sequence[float]], tokens: int) -> str:
    """Tokens per second of every system, median with smallest and largest, one a line."""
    lines = [f"\n{title}"]
    for name, values in seconds.items():
        rate = spread([tokens / value for value in values])
        lines.append(f"  {name:16s} {rate.median:9.1f} tok/s   [{rate.min:.1f}, {rate.max:.1f}]")
    return "\n".join(lines)


def format_times(stats: EngineStats) -> str:
    """Where an engine's steps since its last reset spent their time."""
    paths = ", ".join(f"{path} {value:.2f}" for path, value in stats.executor_s_by_path.items())
    return (
        f"{stats.steps} steps, {stats.step_s:.2f} s = schedule {stats.schedule_s:.3f} + router "
        f"{stats.router_s:.3f} + forward {stats.executor_s:.2f} (attention "
        f"{stats.attention_s:.2f}, {paths}) + sampler {stats.sampler_s:.3f} + memory {stats.memory_s:.3f}"
    )


def _request_id(row: int) -> str:
    return f"decode-{row}"
