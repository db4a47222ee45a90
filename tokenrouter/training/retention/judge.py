"""What a policy loses in windows at hand, by their sums: nothing is run again, so one window takes a second.

N entries, I intervals, G layer groups.
"""

from collections.abc import Sequence

import torch

from tokenrouter.kvcache.retention import RetentionPolicy
from tokenrouter.training.retention.rows import entries_at
from tokenrouter.training.retention.store import SummedWindow


def lost_frac(
    policy: RetentionPolicy, windows: Sequence[SummedWindow], *, sinks: int, recent: int
) -> float:
    """Share of ``needed`` that lies on entries which the policy had evicted by then, mean over windows.

    A first estimate: losses of several entries at one query are added up, and attention is that of a run from which
    nothing is evicted.

    Args:
        policy: asked at every interval of every group, as an engine does.
        windows: of one data set.
        sinks: first entries, which always stay.
        recent: last entries, likewise.
    """
    shares = [_lost(policy, window, sinks, recent) for window in windows]
    return sum(shares) / len(shares)


def _lost(policy: RetentionPolicy, window: SummedWindow, sinks: int, recent: int) -> float:
    needed_GIN = window.sums.needed_GIN
    num_groups, num_intervals, num_tokens = needed_GIN.shape
    interval = num_tokens // num_intervals
    lost = total = 0.0
    for group in range(num_groups):
        kept_N = torch.empty(0, dtype=torch.int64)
        is_gone = torch.zeros(num_tokens, dtype=torch.bool)
        for decided in range(1, num_intervals):
            seen = decided * interval
            positions_N = torch.cat([kept_N, torch.arange(seen - interval, seen)])
            is_guarded_N = (positions_N < sinks) | (positions_N >= seen - recent)
            entries = entries_at(window, group, seen, positions_N)
            is_kept_N = policy.keep(entries, is_guarded_N) | is_guarded_N
            is_gone[positions_N[~is_kept_N]] = True
            kept_N = positions_N[is_kept_N]
            lost += float(needed_GIN[group, decided, is_gone].sum())
            total += float(needed_GIN[group, decided].sum())
    return lost / max(total, 1e-12)
