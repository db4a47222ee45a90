"""What is seen of a run's usual troubles: one function per rule of ``doctor_rules``."""

from collections.abc import Mapping

from tokenrouter.engine.retention_notes import LEAST_SAVED_FRAC
from tokenrouter.tasks.comparison_report import HIGH_OVERHEAD_FRAC, LEAST_CACHE_HIT_FRAC
from tokenrouter.tasks.doctor_run import FinishedRun, Seen
from tokenrouter.wording import counted

OVERHEAD_WARNING_FRAC = 0.05
AS_FAST_FRAC = 0.97
PREEMPTIONS_PER_REQUEST = 0.1
QUEUED_FRAC = 0.1
REQUESTS_FOR_P99 = 100
WITHOUT_THRESHOLD = ("AllHighRouter", "AllLowRouter", "LayerwiseRouter")


def run_failed(run: FinishedRun) -> Seen | None:
    """The run ended with an error."""
    if run.status.get("status") != "failed":
        return None
    return Seen("serious", str(run.status.get("error") or "no error was recorded"))


def run_unfinished(run: FinishedRun) -> Seen | None:
    """The run never came to its end."""
    if run.status.get("status") != "running":
        return None
    return Seen("serious", f"started at {run.status.get('started_at')}, and no end was recorded")


def files_damaged(run: FinishedRun) -> Seen | None:
    """A file that was not written to its end, or holds something else."""
    return Seen("serious", "; ".join(run.damaged)) if run.damaged else None


def files_missing(run: FinishedRun) -> Seen | None:
    """A run that ended well has every file that its task writes."""
    if run.status.get("status") in ("failed", "running") or not (missing := run.missing):
        return None
    return Seen("serious", f"no {', '.join(missing)}")


def router_too_heavy(run: FinishedRun) -> Seen | None:
    """Features and router against the forwards of the same tokens."""
    overhead = run.number("router.overhead_frac")
    if overhead is None or overhead <= OVERHEAD_WARNING_FRAC:
        return None
    text = f"router.overhead_frac {overhead:.1%}"
    if (us := run.number("router.us_per_token")) is not None:
        text += f", {us:.1f} us per token"
    return Seen("serious" if overhead > HIGH_OVERHEAD_FRAC else "warning", text)


def cache_cold(run: FinishedRun) -> Seen | None:
    """Only a router with a cache reports a hit rate."""
    hits = run.number("router.cache_hit_frac")
    is_cold = hits is not None and hits < LEAST_CACHE_HIT_FRAC
    return Seen("warning", f"router.cache_hit_frac {hits:.1%}") if is_cold else None


def prefixes_cold(run: FinishedRun) -> Seen | None:
    """Prefix sharing is on, and no request began as an earlier one."""
    if not run.option("kvcache.prefix_sharing") or run.number("kv.shared_tokens") != 0:
        return None
    return Seen("warning", f"kv.shared_tokens 0, router {run.option('router._target_')}")


def threshold_never_met(run: FinishedRun) -> Seen | None:
    """All tokens of a phase took one side, though the router is one that tells them apart."""
    target = str(run.option("router._target_") or "")
    if run.option("executor.low") is None or target.rpartition(".")[2] in WITHOUT_THRESHOLD:
        return None
    found = []
    for section in ("routes", "quality.routes"):
        for phase in ("prefill", "decode"):
            high = run.number(f"{section}.high.{phase}_token_frac")
            low = run.number(f"{section}.low.{phase}_token_frac")
            if high is not None and low is not None and {high, low} == {0.0, 1.0}:
                found.append(f"{section}.high.{phase}_token_frac {high:.0f}")
    return Seen("warning", ", ".join(found)) if found else None


def tokens_degraded(run: FinishedRun) -> Seen | None:
    """Tokens ran on another route than the router asked for."""
    routes = run.metrics.get("routes")
    found = [
        f"routes.{name}.degraded_frac {share:.1%}"
        for name in (routes if isinstance(routes, Mapping) else ())
        if (share := run.number(f"routes.{name}.degraded_frac"))
    ]
    return Seen("warning", ", ".join(found)) if found else None


def retention_never_evicts(run: FinishedRun) -> Seen | None:
    """A policy was on and neither evicted an entry nor made one int8."""
    evicted, int8 = run.number("kv.evicted_tokens"), run.number("kv.int8_tokens")
    if run.option("kvcache.retention") is None or evicted != 0 or int8:
        return None
    interval = run.option("kvcache.retention.interval")
    return Seen("warning", f"kv.evicted_tokens 0, with kvcache.retention.interval={interval}")


def retention_saves_nothing(run: FinishedRun) -> Seen | None:
    """Entries were evicted, and the peak is where it would be without."""
    evicted, saved = run.number("kv.evicted_tokens"), run.number("kv.saved_frac")
    if not evicted or saved is None or saved >= LEAST_SAVED_FRAC:
        return None
    return Seen("warning", f"kv.evicted_tokens {evicted:,.0f}, kv.saved_frac {saved:.1%}")


def freed_not_returned(run: FinishedRun) -> Seen | None:
    """Entries were evicted, and no page went back to the system."""
    evicted, live = run.number("kv.evicted_tokens"), run.number("kv.peak_live_bytes")
    if not evicted or live is None or run.number("kv.compactions") != 0:
        return None
    allocated = run.number("kv.peak_allocated_bytes") or live
    return Seen(
        "note",
        f"kv.evicted_tokens {evicted:,.0f}, kv.compactions 0; at the peak {live / 1e6:.1f} MB live, "
        f"{allocated / 1e6:.1f} MB allocated",
    )


def many_preemptions(run: FinishedRun) -> Seen | None:
    """Requests lost their slots and were computed again."""
    counts = (step.get("num_preemptions") for step in run.steps)
    count = sum(number for number in counts if isinstance(number, int))
    num_requests = run.number("throughput.workload.num_requests")
    if not count or count < PREEMPTIONS_PER_REQUEST * (num_requests or 0.0):
        return None
    of = f" of {counted(num_requests, 'request')}" if num_requests else ""
    text = f"{counted(count, 'preemption')} in the last pass{of}"
    if (again := run.number("kv.preemption.recomputed_tokens")) is not None:
        text += f"; {again:,.0f} tokens of a pass ran again (kv.preemption.recomputed_tokens)"
    return Seen("warning", text)


def queued_waits(run: FinishedRun) -> Seen | None:
    """With queued dispatch, time in which requests could not run."""
    queue, whole = run.number("latency.queue_ms.mean"), run.number("latency.e2e_ms.mean")
    if run.option("scheduler.dispatch") != "queued" or queue is None or not whole:
        return None
    if queue <= QUEUED_FRAC * whole:
        return None
    return Seen(
        "warning",
        f"latency.queue_ms.mean {queue:.1f} of latency.e2e_ms.mean {whole:.1f} ({queue / whole:.0%}; waits for a seat "
        f"count too), with scheduler.min_batch={run.option('scheduler.min_batch')} and "
        f"max_wait_steps={run.option('scheduler.max_wait_steps')}",
    )


def uniform_lengths(run: FinishedRun) -> Seen | None:
    """Whole requests in and out is as fast as scheduling per token."""
    static = run.number("baselines.static_batch.output_tok_s")
    continuous = run.number("baselines.all_high.output_tok_s")
    if static is None or continuous is None or static < AS_FAST_FRAC * continuous:
        return None
    return Seen(
        "note",
        f"baselines.static_batch.output_tok_s {static:.1f}, baselines.all_high.output_tok_s {continuous:.1f}",
    )


def too_few_requests(run: FinishedRun) -> Seen | None:
    """A p99 over fewer than a hundred values is close to their largest."""
    count = run.number("throughput.workload.num_requests")
    num_repeats = run.option("evaluation.num_repeats")
    if count is None or run.number("latency.ttft_ms.p99") is None:
        return None
    if not isinstance(num_repeats, int):
        return None
    total = count * num_repeats
    if total >= REQUESTS_FOR_P99:
        return None
    return Seen("note", f"{counted(total, 'request')} in all passes ({count:.0f} different)")


def commit_unknown(run: FinishedRun) -> Seen | None:
    """The code that ran is in no commit."""
    if not run.provenance:
        is_due = "provenance.json" in run.missing and run.status.get("status") == "ok"
        return Seen("note", "no provenance.json") if is_due else None
    commit, dirty = run.provenance.get("commit"), run.provenance.get("dirty")
    if commit is None:
        return Seen("note", "provenance.json has no commit")
    if dirty is False:
        return None
    state = "the tree differed from it" if dirty else "whether the tree differed is not known"
    return Seen("note", f"commit {str(commit)[:8]}, and {state}")
