"""The usual troubles of a run, one rule each. docs/troubleshooting.md is the same table."""

from tokenrouter.kvcache.compaction import MIN_FREE_FRAC, MIN_SLOTS, PATIENCE_STEPS
from tokenrouter.tasks import doctor_checks as checks
from tokenrouter.tasks.doctor_run import Rule

RULES = (
    Rule(
        name="run_failed",
        when="`status.json` says `failed`",
        why="What it left is incomplete; the other rules see only what was written before",
        cure="Mend what the error names, and run again; `status.json` has the traceback. After an interruption by the "
        "user nothing needs mending",
        check=checks.run_failed,
    ),
    Rule(
        name="run_unfinished",
        when="`status.json` says `running`",
        why="The run is still going, or it was killed, most often for lack of memory",
        cure="Where it was killed: a smaller KV pool (`kvcache.num_slots=16384`), fewer requests at once "
        "(`scheduler.max_num_seqs=8`), shorter windows (`evaluation=short`)",
        check=checks.run_unfinished,
    ),
    Rule(
        name="files_damaged",
        when="a file of the run cannot be read to its end, or holds a value that no run writes",
        why="The run was stopped while it wrote, or the file was changed since; rules see only what can be read",
        cure="Repeat the run; quote no number of this one",
        check=checks.files_damaged,
    ),
    Rule(
        name="files_missing",
        when="a run that did not fail lacks a file that every run of its task writes",
        why="Rules about what it holds cannot apply, so that nothing found is no sign of health",
        cure="Copy the whole folder, or repeat the run",
        check=checks.files_missing,
    ),
    Rule(
        name="router_too_heavy",
        when="`router.overhead_frac` over 5 %; serious over 10 %",
        why="The time that low tokens save goes into deciding which ones they are",
        cure="Decide once per request (`router=request_level`), or where few requests decode every few tokens "
        "(`router=interval`); keep a costly router's answers (`router=cached`; trained ones are cheaper than it); "
        "fewer features (`router.repeats=0`, `router.high_types=[]`); more tokens a step (`scheduler.max_num_seqs=64`)",
        check=checks.router_too_heavy,
    ),
    Rule(
        name="cache_cold",
        when="`router.cache_hit_frac`, where the router has a cache, under 40 %",
        why="A miss costs the look-up and the decision",
        cure="Round what the key holds (`router.key=pattern`) and round it more (`router.steps_per_octave=1`, "
        "`router.exact_below=1`), serve more requests that have text in common (`workload=mooncake`), or take a router "
        "without a cache (`router=rule`)",
        check=checks.cache_cold,
    ),
    Rule(
        name="prefixes_cold",
        when="`kvcache.prefix_sharing` is on, `kv.shared_tokens` is 0",
        why="No prompt of a pass begins as an earlier one under the same key: other text, shorter than a block, or a "
        "router that looks at the prompt's length (rule) or at history",
        cure="Requests with text in common (`workload=mooncake`), shorter blocks (`kvcache.prefix_block=16`), a router "
        "that looks at tokens alone (`router=random`)",
        check=checks.prefixes_cold,
    ),
    Rule(
        name="threshold_never_met",
        when="all tokens of a phase took one path: `prefill_token_frac` or `decode_token_frac` of high is 0 or 1",
        why="No token was chosen: the run is all_high or all_low at the price of a router",
        cure="A budget sets the threshold by itself (`router.budget.high_frac=0.1`; random and request_level: "
        "`router.high_frac=0.1`). With a budget already: set it on text like the requests' (`data=code_python`), or "
        "serve longer requests",
        check=checks.threshold_never_met,
    ),
    Rule(
        name="tokens_degraded",
        when="`routes.<name>.degraded_frac` over 0",
        why="These tokens ran on another path than the router asked for: quality and speed are not the router's",
        cure="Choose a pool with the executor (`executor=int8`, `executor=int8_smooth`, `executor=int8_shared`), or a "
        "router without that route (`router=all_high`)",
        check=checks.tokens_degraded,
    ),
    Rule(
        name="retention_never_evicts",
        when="a retention policy is on, `kv.evicted_tokens` and `kv.int8_tokens` are 0",
        why="Requests end before the policy is asked, or its budget or threshold keeps everything",
        cure="Ask earlier (`kvcache.retention.interval=64`), guard fewer entries (`kvcache.retention.recent=16`), "
        "evict more (`kvcache.retention.policy.evicted_frac=0.75`; kvcache=threshold: "
        "`kvcache.retention.policy.threshold=0.3`), or serve longer requests (`workload.output_max=256`)",
        check=checks.retention_never_evicts,
    ),
    Rule(
        name="retention_saves_nothing",
        when="`kv.evicted_tokens` over 0, `kv.saved_frac` under 2 %",
        why="Quality is paid for memory that is not saved: the peak comes before the entries go",
        cure="Evict before the peak: `kvcache.retention.interval=64`, `scheduler.max_num_batched_tokens=256`; or a "
        "smaller share stays (`kvcache.retention.policy.evicted_frac=0.75`)",
        check=checks.retention_saves_nothing,
    ),
    Rule(
        name="freed_not_returned",
        when="`kv.evicted_tokens` over 0, `kv.compactions` 0",
        why="Freed slots serve new requests, but the process keeps their pages",
        cure=f"Pages go back once {MIN_SLOTS:,} slots, and {MIN_FREE_FRAC:.0%} of those in use, were free for "
        f"{PATIENCE_STEPS} steps, or at once when no request is left: longer requests come to that. Else bound the "
        "pool at what is live (`kvcache.num_slots=4096`)",
        check=checks.freed_not_returned,
    ),
    Rule(
        name="many_preemptions",
        when="one preemption or more per 10 requests (`num_preemptions` in `steps.jsonl`)",
        why="A preempted request is computed again from its first token, unless its entries are kept outside the pool",
        cure="More slots (`kvcache.num_slots=65536`), fewer requests at once (`scheduler.max_num_seqs=16`), smaller "
        "entries (`kvcache=int8`) or fewer (`kvcache=sink_window`), or room outside the pool "
        "(`kvcache.num_host_slots=16384`)",
        check=checks.many_preemptions,
    ),
    Rule(
        name="queued_waits",
        when="`scheduler.dispatch=queued`, and requests wait over 10 % of their time",
        why="A decode token waits for company on its route; its request's next token comes later",
        cure="`scheduler.dispatch=auto` waits only where it pays; or bound the wait (`scheduler.max_wait_steps=1`, "
        "`scheduler.min_batch=2`)",
        check=checks.queued_waits,
    ),
    Rule(
        name="uniform_lengths",
        when="static_batch reaches 97 % or more of all_high's `output_tok_s`",
        why="Requests of one length that arrive together leave nothing for scheduling per token to gain",
        cure="Judge scheduling on mixed lengths or arrivals over time: `workload=mixed_lengths`, `workload=poisson`",
        check=checks.uniform_lengths,
    ),
    Rule(
        name="too_few_requests",
        when="fewer than 100 requests in all passes, and a p99",
        why="The p99 is then near the largest value, and moves with every run",
        cure="Quote p50 or p90, or serve more: `workload=poisson` with `workload.num_requests=100`",
        check=checks.too_few_requests,
    ),
    Rule(
        name="commit_unknown",
        when="`provenance.json`: no commit, or `dirty` is not false; or a run that ended well has none",
        why="Nobody can check out the code that gave these numbers",
        cure="Commit the changes, and run again before quoting",
        check=checks.commit_unknown,
    ),
)
