"""Memory over the steps of a run whose retention policy evicts and whose requests end at different times."""

from dataclasses import asdict, dataclass
from typing import Any

from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.kvcache.retention import RetentionOptions, SinkWindow
from tokenrouter.telemetry.memory import process_bytes

from .setup import Bench

RELEASE_TITLE = f"{'step':>6}{'running':>9}{'live MB':>10}{'allocated MB':>14}{'process MB':>12}{'given back':>12}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """After a step.

    Attributes:
        live_bytes: of entries that requests have.
        allocated_bytes: of slots whose memory is in use, free ones among them.
        process_bytes: resident size of the whole process, weights and all.
        compactions: times that memory was given back so far.
    """

    step: int
    running: int
    live_bytes: int
    allocated_bytes: int
    process_bytes: int
    compactions: int


def release(bench: Bench) -> list[Moment]:
    """One request goes on long after the others have ended."""
    sizes, retention = bench.sizes, RetentionOptions(policy=SinkWindow(evicted_frac=0.5))
    llm = bench.llm(
        EngineOptions(
            retention=retention,
            max_num_seqs=sizes.release_requests,
            num_kv_slots=sizes.release_requests * (sizes.release_context + sizes.release_long),
        )
    )
    for index in range(sizes.release_requests):
        start = index * sizes.release_context
        llm.engine.add_request(
            str(index),
            bench.ids[start : start + sizes.release_context],
            SamplingParams(
                temperature=0.0,
                max_tokens=sizes.release_short if index else sizes.release_long,
                ignore_eos=True,
                detokenize=False,
            ),
            stream=False,
        )
    moments = [_moment(llm)]
    while llm.engine.has_unfinished():
        before = llm.engine.stats.num_compactions
        llm.engine.step()
        stats = llm.engine.stats
        is_due = stats.steps % sizes.release_every == 0 or not llm.engine.has_unfinished()
        if is_due or stats.num_compactions != before:
            moments.append(_moment(llm))
    return moments


def as_values(moments: list[Moment]) -> dict[str, Any]:
    """Plain values: the table, and from the peak to the end what was freed and what the process is smaller by."""
    peak = max(moments, key=lambda moment: moment.allocated_bytes)
    last = moments[-1]
    return {
        "freed_bytes": peak.allocated_bytes - last.allocated_bytes,
        "process_smaller_by_bytes": peak.process_bytes - last.process_bytes,
        "steps": [asdict(moment) for moment in moments],
    }


def format_release(moments: list[Moment]) -> str:
    """The table and its last line in words."""
    found = as_values(moments)
    return "\n".join(
        [
            "\nmemory of a run with retention sink_window",
            RELEASE_TITLE,
            *map(_line, moments),
            f"  From its peak to its end, {found['freed_bytes'] / 1e6:.1f} MB of slots were given back; the process "
            f"is smaller by {found['process_smaller_by_bytes'] / 1e6:.1f} MB.",
        ]
    )


def _moment(llm: LLM) -> Moment:
    engine = llm.engine
    full, int8 = engine.kv_bytes_per_slot, engine.int8_bytes_per_slot
    return Moment(
        step=engine.stats.steps,
        running=len(engine.scheduler.running),
        live_bytes=engine.pool.used_bytes(full, int8),
        allocated_bytes=engine.pool.touched_bytes(full, int8),
        process_bytes=process_bytes(),
        compactions=engine.stats.num_compactions,
    )


def _line(moment: Moment) -> str:
    return (
        f"{moment.step:>6}{moment.running:>9}{moment.live_bytes / 1e6:>10.1f}"
        f"{moment.allocated_bytes / 1e6:>14.1f}{moment.process_bytes / 1e6:>12.1f}{moment.compactions:>12}"
    )
