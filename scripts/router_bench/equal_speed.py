"""Whether the learned router is closer to the reference than others that are as fast as it is, in each phase.

Another router at the same share of high tokens is faster or slower, by what its decision costs. So its KL is read off
its own curve of KL against throughput, where the learned router's throughput is: by a line between its two neighbours
of all_low, its measured shares and all_high. A line lies above a curve that bends, so where neighbours are far apart,
beyond the largest share, the comparison favours the learned router. For the interval, windows and turns are drawn
again, each with replacement: an unsteady machine makes ties.

D draws, P points of a curve, T turns, W windows.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenrouter.evaluation.router_scores import (
    Bootstrap,
    Verdict,
    as_values,
    interval_of,
    verdict_of,
)
from tokenrouter.types import Phase

from .measures import Measured
from .routings import Key, Pick
from .throughput import Speeds

JUDGED = "mlp"
RIVALS: Mapping[str, Pick] = {"rule": "rank", "layerwise": "exact"}


class Point(NamedTuple):
    """Throughput as a multiple of all_high's, and mean KL in nats; float64 ``[1 + D]``: as measured, then drawn."""

    speed: Tensor
    kl: Tensor


def compared(
    found: Mapping[Key, Measured], speeds: Speeds, rival: str, phase: Phase
) -> list[dict[str, Any]]:
    """Per share the mlp's KL over that of ``rival`` at the mlp's throughput, its interval and what that means.

    Args:
        found: of one text.
        speeds: of the same executor and phase.
        rival: of ``RIVALS``.
        phase: of the tokens that are decided.
    """
    low = found[phase, "all_low", "exact", 0.0]
    draws = _Draws(speeds, num_windows=len(low.kl_WN))
    shares = sorted(key[3] for key in found if key[:3] == (phase, JUDGED, "rank"))
    own = [m for key, m in found.items() if key[:3] == (phase, rival, RIVALS[rival])]
    curve = [draws.point(low, "all_low"), *(draws.point(m, rival) for m in own), draws.all_high()]
    rows = []
    for share in shares:
        point = draws.point(found[phase, JUDGED, "rank", share], JUDGED)
        other = kl_at(curve, point.speed)
        ratio, difference = point.kl / other, point.kl - other
        rows.append(
            {
                "share": share,
                "tok_s_vs_all_high": float(point.speed[0]),
                "kl_ratio": as_values(interval_of(float(ratio[0]), ratio[1:])),
                f"{JUDGED}_is": verdict_of(interval_of(float(difference[0]), difference[1:])),
            }
        )
    return rows


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """Of several: better where all are, worse where one is, else a tie."""
    if set(verdicts) == {"better"}:
        return "better"
    return "worse" if "worse" in verdicts else "tie"


def kl_at(curve: Sequence[Point], speed: Tensor) -> Tensor:
    """KL at a throughput, on the line between neighbours; that of the ends beyond them. Draw by draw.

    Args:
        curve: at least one point, in any order.
        speed: as a multiple of all_high's, ``[1 + D]``.
    """
    speed_DP, order_DP = torch.stack([p.speed for p in curve], 1).sort(1)
    kl_DP = torch.stack([p.kl for p in curve], 1).gather(1, order_DP)
    rows = zip(speed.tolist(), speed_DP.numpy(), kl_DP.numpy(), strict=True)
    return torch.tensor([float(np.interp(*row)) for row in rows], dtype=torch.float64)


class _Draws:
    """Windows and turns drawn again, the same for every router."""

    def __init__(self, speeds: Speeds, *, num_windows: int) -> None:
        self._speeds, self._bootstrap = speeds, Bootstrap(num_windows)
        num_draws = len(self._bootstrap.means(torch.zeros(num_windows)))
        num_turns = len(speeds.vs_all_high("all_low", 0.0))
        draw = torch.Generator().manual_seed(1)
        self._index_DT = torch.randint(num_turns, (num_draws, num_turns), generator=draw)

    def point(self, measured: Measured, router: str) -> Point:
        """Of one router at one share."""
        turns = self._speeds.vs_all_high(router, float(measured.high_frac_W.mean()))
        speed_T, kl_W = torch.tensor(turns, dtype=torch.float64), measured.kl_WN.double().mean(1)
        return Point(
            torch.cat([speed_T.quantile(0.5)[None], speed_T[self._index_DT].quantile(0.5, 1)]),
            torch.cat([kl_W.mean()[None], self._bootstrap.means(kl_W)]),
        )

    def all_high(self) -> Point:
        """Its KL is 0, and speeds are multiples of its own."""
        ones = torch.ones(1 + len(self._index_DT), dtype=torch.float64)
        return Point(ones, torch.zeros_like(ones))
