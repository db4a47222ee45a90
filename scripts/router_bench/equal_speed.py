"""Whether the learned router is closer to the reference than others that are as fast as it is, in prefill.

Another router at the same share of high tokens is faster or slower, by what its decision costs. So its KL is read off
its own curve of KL against throughput, where the learned router's throughput is: by a line between its two neighbours
of all_low, its measured shares and all_high, window by window. A line lies above a curve that bends, so where
neighbours are far apart, beyond the largest share, the comparison favours the learned router. Intervals are over
windows; the spread of the throughput is not in them.

W windows.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenrouter.evaluation.router_scores import Bootstrap, Verdict, as_values, ratio
from tokenrouter.types import Phase

from .measures import Measured
from .routings import Key, Pick
from .throughput import Speeds

JUDGED = "mlp"
RIVALS: Mapping[str, Pick] = {"rule": "rank", "layerwise": "exact"}


class Point(NamedTuple):
    """Throughput as a multiple of all_high's, and KL per window in nats, float32 ``[W]``."""

    speed: float
    kl_W: Tensor


def compared(found: Mapping[Key, Measured], speeds: Speeds, rival: str) -> list[dict[str, Any]]:
    """Per share the mlp's KL over that of ``rival`` at the mlp's throughput, its interval and what that means.

    Args:
        found: of one text.
        speeds: of the same executor.
        rival: of ``RIVALS``.
    """
    curve = _curve(found, speeds, rival)
    rows = []
    for (phase, router, pick, share), own in found.items():
        if (phase, router, pick) != (Phase.PREFILL, JUDGED, "rank"):
            continue
        point = _point(own, speeds, router)
        other_W = kl_at(curve, point.speed)
        bootstrap = Bootstrap(len(other_W))
        rows.append(
            {
                "share": share,
                "tok_s_vs_all_high": point.speed,
                "kl_ratio": as_values(bootstrap.interval(ratio, point.kl_W, other_W)),
                f"{JUDGED}_is": bootstrap.verdict(point.kl_W, other_W),
            }
        )
    return sorted(rows, key=lambda row: row["share"])


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """Of several: better where all are, worse where one is, else a tie."""
    if set(verdicts) == {"better"}:
        return "better"
    return "worse" if "worse" in verdicts else "tie"


def kl_at(curve: Sequence[Point], speed: float) -> Tensor:
    """KL per window at a throughput, on the line between neighbours; that of the ends beyond them.

    Args:
        curve: at least one point, in any order.
        speed: as a multiple of all_high's.
    """
    ordered = sorted(curve, key=lambda point: point.speed)
    before = [point for point in ordered if point.speed <= speed][-1:] or ordered[:1]
    behind = [point for point in ordered if point.speed >= speed][:1] or ordered[-1:]
    (slow, fast), gap = (before[0], behind[0]), behind[0].speed - before[0].speed
    part = (speed - slow.speed) / gap if gap > 0 else 0.0
    return torch.lerp(slow.kl_W, fast.kl_W, part)


def _curve(found: Mapping[Key, Measured], speeds: Speeds, rival: str) -> list[Point]:
    low = found[Phase.PREFILL, "all_low", "exact", 0.0]
    own = [m for key, m in found.items() if key[:3] == (Phase.PREFILL, rival, RIVALS[rival])]
    all_high = Point(1.0, torch.zeros(len(low.kl_WN)))
    return [_point(low, speeds, "all_low"), *(_point(m, speeds, rival) for m in own), all_high]


def _point(measured: Measured, speeds: Speeds, router: str) -> Point:
    speed = speeds.vs_all_high(router, float(measured.high_frac_W.mean())).median
    return Point(speed, measured.kl_WN.mean(1))
