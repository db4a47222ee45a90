"""The usual troubles of a run, one rule each. docs/troubleshooting.md is the same table."""

from tokenrouter.engine.retention_notes import LEAST_SAVED_FRAC
from tokenrouter.kvcache.compaction import MIN_FREE_FRAC, MIN_SLOTS, PATIENCE_STEPS
from tokenrouter.tasks.doctor_run import FinishedRun, Rule, Seen
from tokenrouter.tasks.report import HIGH_OVERHEAD_FRAC, LEAST_CACHE_HIT_FRAC

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
    routes = run.metrics.get("routes") or {}
    found = [
        f"routes.{name}.degraded_frac {share:.1%}"
        for name in routes
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
    count = sum(int(step.get("num_preemptions") or 0) for step in run.steps)
    num_requests = run.number("throughput.workload.num_requests")
    if not count or count < PREEMPTIONS_PER_REQUEST * (num_requests or 0.0):
        return None
    of = f" of {num_requests:.0f} requests" if num_requests else ""
    text = f"{count} preemptions in the last pass{of}"
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
    if count is None or run.number("latency.ttft_ms.p99") is None:
        return None
    total = count * int(run.option("evaluation.num_repeats") or 1)
    if total >= REQUESTS_FOR_P99:
        return None
    return Seen("note", f"{total:.0f} requests in all passes ({count:.0f} different ones)")


def commit_unknown(run: FinishedRun) -> Seen | None:
    """The code that ran is in no commit."""
    if not run.provenance:
        return None
    commit, dirty = run.provenance.get("commit"), run.provenance.get("dirty")
    if commit is None:
        return Seen("note", "provenance.json has no commit")
    if dirty is False:
        return None
    state = "the tree differed from it" if dirty else "whether the tree differed is not known"
    return Seen("note", f"commit {str(commit)[:8]}, and {state}")


RULES = (
    Rule(
        name="run_failed",
        when="`status.json` says `failed`",
        why="What it left is incomplete; the other rules see only what was written before",
        cure="Mend what the error names, and run again; `status.json` has the traceback. After an interruption by the "
        "user nothing needs mending",
        check=run_failed,
    ),
    Rule(
        name="run_unfinished",
        when="`status.json` says `running`",
        why="The run is still going, or it was killed, most often for lack of memory",
        cure="Where it was killed: a smaller KV pool (`kvcache.num_slots=16384`), fewer requests at once "
        "(`scheduler.max_num_seqs=8`), shorter windows (`evaluation=short`)",
        check=run_unfinished,
    ),
    Rule(
        name="router_too_heavy",
        when="`router.overhead_frac` over 5 %; serious over 10 %",
        why="The time that low tokens save goes into deciding which ones they are",
        cure="Decide once per request (`router=request_level`), or where few requests decode every few tokens "
        "(`router=interval`); keep a costly router's answers (`router=cached`; trained ones are cheaper than it); "
        "fewer features (`router.repeats=0`, `router.high_types=[]`); more tokens a step (`scheduler.max_num_seqs=64`)",
        check=router_too_heavy,
    ),
    Rule(
        name="cache_cold",
        when="`router.cache_hit_frac`, where the router has a cache, under 40 %",
        why="A miss costs the look-up and the decision",
        cure="Round what the key holds (`router.key=pattern`) and round it more (`router.steps_per_octave=1`, "
        "`router.exact_below=1`), serve more requests that have text in common (`workload=mooncake`), or take a router "
        "without a cache (`router=rule`)",
        check=cache_cold,
    ),
    Rule(
        name="prefixes_cold",
        when="`kvcache.prefix_sharing` is on, `kv.shared_tokens` is 0",
        why="No prompt of a pass begins as an earlier one under the same key: other text, shorter than a block, or a "
        "router that looks at the prompt's length (rule) or at history",
        cure="Requests with text in common (`workload=mooncake`), shorter blocks (`kvcache.prefix_block=16`), a router "
        "that looks at tokens alone (`router=random`)",
        check=prefixes_cold,
    ),
    Rule(
        name="threshold_never_met",
        when="all tokens of a phase took one path: `prefill_token_frac` or `decode_token_frac` of high is 0 or 1",
        why="No token was chosen: the run is all_high or all_low at the price of a router",
        cure="A budget sets the threshold by itself (`router.budget.high_frac=0.1`; random and request_level: "
        "`router.high_frac=0.1`). With a budget already: set it on text like the requests' (`data=code_python`), or "
        "serve longer requests",
        check=threshold_never_met,
    ),
    Rule(
        name="tokens_degraded",
        when="`routes.<name>.degraded_frac` over 0",
        why="These tokens ran on another path than the router asked for: quality and speed are not the router's",
        cure="Choose a pool with the executor (`executor=int8`, `executor=int8_smooth`, `executor=int8_shared`), or a "
        "router without that route (`router=all_high`)",
        check=tokens_degraded,
    ),
    Rule(
        name="retention_never_evicts",
        when="a retention policy is on, `kv.evicted_tokens` and `kv.int8_tokens` are 0",
        why="Requests end before the policy is asked, or its budget or threshold keeps everything",
        cure="Ask earlier (`kvcache.retention.interval=64`), guard fewer entries (`kvcache.retention.recent=16`), "
        "evict more (`kvcache.retention.policy.evicted_frac=0.75`; kvcache=threshold: "
        "`kvcache.retention.policy.threshold=0.3`), or serve longer requests (`workload.output_max=256`)",
        check=retention_never_evicts,
    ),
    Rule(
        name="retention_saves_nothing",
        when="`kv.evicted_tokens` over 0, `kv.saved_frac` under 2 %",
        why="Quality is paid for memory that is not saved: the peak comes before the entries go",
        cure="Evict before the peak: `kvcache.retention.interval=64`, `scheduler.max_num_batched_tokens=256`; or a "
        "smaller share stays (`kvcache.retention.policy.evicted_frac=0.75`)",
        check=retention_saves_nothing,
    ),
    Rule(
        name="freed_not_returned",
        when="`kv.evicted_tokens` over 0, `kv.compactions` 0",
        why="Freed slots serve new requests, but the process keeps their pages",
        cure=f"Pages go back once {MIN_SLOTS:,} slots, and {MIN_FREE_FRAC:.0%} of those in use, were free for "
        f"{PATIENCE_STEPS} steps, or at once when no request is left: longer requests come to that. Else bound the "
        "pool at what is live (`kvcache.num_slots=4096`)",
        check=freed_not_returned,
    ),
    Rule(
        name="many_preemptions",
        when="one preemption or more per 10 requests (`num_preemptions` in `steps.jsonl`)",
        why="A preempted request is computed again from its first token, unless its entries are kept outside the pool",
        cure="More slots (`kvcache.num_slots=65536`), fewer requests at once (`scheduler.max_num_seqs=16`), smaller "
        "entries (`kvcache=int8`) or fewer (`kvcache=sink_window`), or room outside the pool "
        "(`kvcache.num_host_slots=16384`)",
        check=many_preemptions,
    ),
    Rule(
        name="queued_waits",
        when="`scheduler.dispatch=queued`, and requests wait over 10 % of their time",
        why="A decode token waits for company on its route; its request's next token comes later",
        cure="`scheduler.dispatch=auto` waits only where it pays; or bound the wait (`scheduler.max_wait_steps=1`, "
        "`scheduler.min_batch=2`)",
        check=queued_waits,
    ),
    Rule(
        name="uniform_lengths",
        when="static_batch reaches 97 % or more of all_high's `output_tok_s`",
        why="Requests of one length that arrive together leave nothing for scheduling per token to gain",
        cure="Judge scheduling on mixed lengths or arrivals over time: `workload=mixed_lengths`, `workload=poisson`",
        check=uniform_lengths,
    ),
    Rule(
        name="too_few_requests",
        when="fewer than 100 requests in all passes, and a p99",
        why="The p99 is then near the largest value, and moves with every run",
        cure="Quote p50 or p90, or serve more: `workload=poisson` with `workload.num_requests=100`",
        check=too_few_requests,
    ),
    Rule(
        name="commit_unknown",
        when="`provenance.json`: no commit, or `dirty` is not false",
        why="Nobody can check out the code that gave these numbers",
        cure="Commit the changes, and run again before quoting",
        check=commit_unknown,
    ),
)
