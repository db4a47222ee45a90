"""What a report says of retention: also, and why, where a policy evicted nothing or its evictions freed nothing."""

from tokenrouter.evaluation.throughput import Throughput
from tokenrouter.kvcache.compaction import MIN_FREE_FRAC, MIN_SLOTS, PATIENCE_STEPS
from tokenrouter.kvcache.retention import Full, RetentionOptions, Threshold


def memory_notes(retention: RetentionOptions, served: Throughput) -> list[str]:
    """One or two sentences.

    Args:
        retention: of the system that served.
        served: its passes.
    """
    stats = [repeat.stats for repeat in served.repeats]
    name = f"Retention {retention.policy.name}"
    num_decisions = sum(s.retention_decisions for s in stats)
    if not num_decisions:
        return [
            f"{name} evicted nothing: no request came to its first decision, at {retention.interval} tokens. Lower "
            "kvcache.retention.interval, or serve longer requests."
        ]
    evicted = sum(s.evicted_entries for s in stats)
    num_int8 = max(s.peak_int8_tokens for s in stats)
    if not evicted and not num_int8:
        return [f"{name} was asked {num_decisions:,} times and evicted nothing: {_why(retention)}"]
    saved = 1 - max(s.peak_live_bytes for s in stats) / max(s.peak_full_bytes for s in stats)
    in_int8 = f" and kept up to {num_int8:,} in int8 at once" if num_int8 else ""
    lines = [
        f"{name} evicted {evicted / len(stats):,.0f} entries a pass{in_int8}; the KV peak is {saved:.0%} below that of "
        "every token in full precision in the same steps."
    ]
    if not any(s.num_compactions for s in stats):
        lines.append(
            f"No memory went back to the system: that takes {MIN_SLOTS:,} free slots, and {MIN_FREE_FRAC:.0%} of "
            f"those in use, for {PATIENCE_STEPS} steps. New requests use the freed slots all the same."
        )
    return lines


def _why(retention: RetentionOptions) -> str:
    guarded = retention.sinks + retention.recent
    if isinstance(retention.policy, Full):
        return "full keeps every entry. Choose another policy."
    if isinstance(retention.policy, Threshold):
        return (
            "every entry beyond sinks and recent ones received more than the threshold. Raise "
            "kvcache.retention.policy.threshold."
        )
    if retention.policy.max_kept(1_000_000) == 1_000_000:
        return "its budget keeps every entry. Raise kvcache.retention.policy.evicted_frac, or set max_entries."
    return (
        f"at these lengths the budget is not below the {guarded} entries that always stay, or protected tokens fill "
        "it. Lower kvcache.retention.sinks and recent, or serve longer requests."
    )
