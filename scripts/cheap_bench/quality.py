"""KL of every way of asking.

N tokens of a window, B routings of it, U different ones, W windows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from scripts.router_bench.asking import is_high
from scripts.router_bench.measures import Measured, kl_nats, means
from scripts.router_bench.routings import Routing, all_low
from scripts.router_bench.setup import Bench, Text
from tokenrouter.evaluation.progress import progress
from tokenrouter.features import TokenTypeTable
from tokenrouter.routers import RandomRouter, Router
from tokenrouter.types import Phase

from .ways import SHARE, ways


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """One way of asking, on one text.

    Attributes:
        kl_W: float64, nats, mean of each window.
        high_frac_W: share of high tokens.
        hit_frac: of the tokens, those that a cache answered, which was empty before the first window; None: no cache.
    """

    kl_W: Tensor
    high_frac_W: Tensor
    hit_frac: float | None = None


def measure_quality(bench: Bench, text: Text) -> dict[str, Quality]:
    """By way of asking, and of all_low and random."""
    make = partial(bench.learned, "mlp", bench.executor, SHARE)
    routers = {
        name: text.held_out.calibrated(router, bench.types) for name, router in ways(make).items()
    }
    found: dict[str, list[Measured]] = {}
    with progress(f"{text.name}: KL", len(text.windows), unit="windows") as advance:
        for seed, ids in enumerate(text.windows):
            answers = answered(routers, ids, bench.types, seed)
            kl_BN = _kl(bench, ids, answers)
            for key, measured in means(answers, kl_BN).items():
                found.setdefault(key[1], []).append(measured)
            advance()
    return {name: _quality(windows, routers.get(name)) for name, windows in found.items()}


def answered(
    routers: Mapping[str, Router], ids: Sequence[int], types: TokenTypeTable, seed: int
) -> list[Routing]:
    """Which tokens of a window, a prompt, go high: by router, by chance, and none.

    A random choice counts with the window's first token low and high, each by its chance: alone it is worth as much as
    a large part of a router's gain.
    """
    random_N = is_high(RandomRouter(SHARE, seed), ids, types)
    found = [replace(all_low(), pick="threshold")]
    for first, weight in ((False, 1.0 - SHARE), (True, SHARE)):
        is_high_N = random_N.clone()
        is_high_N[0] = first
        found.append(replace(_routing("random", is_high_N), weight=weight))
    position_N = torch.arange(len(ids))
    for name, router in routers.items():
        decider_N = position_N - position_N % router.decides_every
        found.append(_routing(name, is_high(router, ids, types)[decider_N]))
    return found


def _kl(bench: Bench, ids: Sequence[int], answers: Sequence[Routing]) -> Tensor:
    """Float32 ``[B, N]``; equal routings run once."""
    is_low_BN = torch.stack([a.is_low_LN[0].expand(len(ids)) for a in answers])
    is_low_UN, of_B = is_low_BN.unique(dim=0, return_inverse=True)
    different = [replace(answers[0], is_low_LN=is_low_N[None]) for is_low_N in is_low_UN]
    return kl_nats(bench.decoders[bench.executor], ids, different)[of_B]


def _routing(name: str, is_high_N: Tensor) -> Routing:
    return Routing(
        phase=Phase.PREFILL,
        router=name,
        pick="threshold",
        share=SHARE,
        is_low_LN=~is_high_N[None],
    )


def _quality(windows: Sequence[Measured], router: Router | None) -> Quality:
    counts = None if router is None else router.cache_counts
    return Quality(
        kl_W=torch.stack([w.kl_WN.double().mean() for w in windows]),
        high_frac_W=torch.stack([w.high_frac_W for w in windows]),
        hit_frac=counts and counts.hits / counts.lookups,
    )
