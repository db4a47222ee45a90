"""What a report says of retention: also, and why, where a policy evicted nothing or its evictions freed nothing."""

from collections.abc import Sequence

from tokenrouter.engine import EngineStats
from tokenrouter.engine.retention_notes import (
    saved_frac,
    why_idle,
    why_not_returned,
    why_peak_stays,
)
from tokenrouter.kvcache.retention import RetentionOptions


def memory_notes(
    retention: RetentionOptions,
    stats: Sequence[EngineStats],
    *,
    place: str = "",
    unit: str = "pass",
) -> list[str]:
    """One to three sentences.

    Args:
        retention: of the system.
        stats: its counters, of one or several runs over the same.
        place: of the run, where there is more than one, such as ``in the windows of text``.
        unit: what each of ``stats`` counts.
    """
    name = f"Retention {retention.policy.name}{f', {place},' if place else ''}"
    if (idle := why_idle(retention, stats)) is not None:
        return [f"{name} {idle}"]
    evicted = sum(s.evicted_entries for s in stats)
    num_int8 = max(s.peak_converted for s in stats)
    in_int8 = f" and kept up to {num_int8:,} in int8 at once" if num_int8 else ""
    line = (
        f"{name} evicted {evicted / len(stats):,.0f} entries a {unit}{in_int8}; the KV peak is "
        f"{saved_frac(stats):.0%} below that of every token, kept as it comes, in the same steps."
    )
    return [line, *filter(None, (why_peak_stays(stats), why_not_returned(stats)))]
