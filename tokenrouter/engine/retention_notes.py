"""Why a retention policy did nothing, or nothing came of it: said by reports, and once by a library's engine."""

import logging
from collections.abc import Sequence

from tokenrouter.engine.stats import EngineStats
from tokenrouter.kvcache.compaction import MIN_FREE_FRAC, MIN_SLOTS, PATIENCE_STEPS
from tokenrouter.kvcache.retention import Full, RetentionOptions, Threshold

log = logging.getLogger(__name__)

LEAST_SAVED_FRAC = 0.02
"""A KV peak that is lower by less than this counts as not lowered."""


def why_idle(retention: RetentionOptions, stats: Sequence[EngineStats]) -> str | None:
    """What kept the policy from acting, and what to do; None where it evicted an entry or made one int8.

    Args:
        retention: of the engine.
        stats: its counters, one or several passes.
    """
    num_decisions = sum(s.retention_decisions for s in stats)
    if any(s.evicted_entries or s.peak_converted for s in stats):
        return None
    if any(s.shared_tokens >= retention.interval for s in stats):
        return None  # decisions that came with a prefix are counted where they were made
    if not num_decisions:
        return (
            f"evicted nothing: no request came to its first decision, at {retention.interval} tokens. Lower "
            "kvcache.retention.interval, or serve longer requests."
        )
    return f"was asked {num_decisions:,} times and evicted nothing: {_why_kept(retention)}"


def saved_frac(stats: Sequence[EngineStats]) -> float:
    """How far the KV peak is below that of every token, kept as it is first stored, in the same steps, 0 to 1."""
    kept_bytes = max(s.peak_kept_bytes for s in stats)
    return 1 - max(s.peak_live_bytes for s in stats) / kept_bytes if kept_bytes else 0.0


def why_peak_stays(stats: Sequence[EngineStats]) -> str | None:
    """Why a policy that acts lowered the KV peak by less than ``LEAST_SAVED_FRAC``; None where it did lower it."""
    if saved_frac(stats) >= LEAST_SAVED_FRAC:
        return None
    return (
        "The KV peak is not lower for it: it comes before the entries go. Lower kvcache.retention.interval and "
        "scheduler.max_num_batched_tokens, or let fewer entries stay."
    )


def why_not_returned(stats: Sequence[EngineStats]) -> str | None:
    """Why the process is as large as before; None where memory went back to the system."""
    if any(s.num_compactions for s in stats):
        return None
    return (
        f"No memory went back to the system: that takes {MIN_SLOTS:,} free slots, and {MIN_FREE_FRAC:.0%} of "
        f"those in use, for {PATIENCE_STEPS} steps, or no request at all. New requests use the freed slots all "
        "the same."
    )


class RetentionWatch:
    """Says in the log, each of it once, that the policy of an engine has done nothing, or that nothing came of it.

    A warning where it never acted or the KV peak is not lower; where only no memory went back to the system, which
    short runs never come to, it is no more than information.
    """

    def __init__(self, retention: RetentionOptions | None, stats: EngineStats) -> None:
        """``stats``: of the engine with ``retention``, as they are when ``check`` is called."""
        self._retention, self._stats = retention, stats
        self._said: set[str] = set()

    def check(self) -> None:
        """Looks at what the engine did since its counters' last reset; for when requests have ended."""
        if self._retention is None or not self._stats.steps:
            return
        stats, name = (self._stats,), f"retention {self._retention.policy.name}"
        if (idle := why_idle(self._retention, stats)) is not None:
            kind = "asked" if self._stats.retention_decisions else "never asked"
            text = f"{name} {idle} In Python these are the options of EngineOptions."
            self._say(kind, logging.WARNING, text)
        elif (stays := why_peak_stays(stats)) is not None:
            text = f"{name} evicted {self._stats.evicted_entries:,} entries. {stays}"
            self._say("peak stays", logging.WARNING, text)
        elif (kept := why_not_returned(stats)) is not None:
            self._say("not returned", logging.INFO, f"{name}: {kept}")

    def _say(self, kind: str, level: int, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            log.log(level, "%s", text)


def _why_kept(retention: RetentionOptions) -> str:
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
