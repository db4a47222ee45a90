"""How fast an engine runs a prompt with each router at each share, the router's own time included.

The high path is bfloat16, as it is served. All systems take turns, so that drift of the machine hits all alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tokenrouter import LLM
from tokenrouter.engine import EngineOptions
from tokenrouter.evaluation import ratios as timing
from tokenrouter.executors import build_pool
from tokenrouter.routers import AllLowRouter, LayerwiseRouter, RandomRouter, Router
from tokenrouter.telemetry import Spread, spread
from tokenrouter.types import Phase

from .asking import decided, shown
from .cost import some_ids
from .routings import num_high_layers
from .setup import Bench

UNSERVED = {"oracle": "random"}
"""The oracle knows what no engine does: it is as fast as random, whose decision costs next to nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Prefill of one prompt, by router.

    Attributes:
        all_high_tok_s: tokens per second of all_high.
        times: by router, from the smallest share on: the share of the high work, and per turn the time as a multiple
            of all_high's in the same turn. ``all_low`` has one entry.
    """

    all_high_tok_s: Spread
    times: Mapping[str, Sequence[tuple[float, Sequence[float]]]]

    def vs_all_high(self, router: str, high_frac: float) -> list[float]:
        """Per turn, tokens per second as a multiple of all_high's: measured, or in between by a line through times.

        Beyond the measured shares the line goes on to all_low and to all_high.

        Args:
            router: its name.
            high_frac: share of the high work.
        """
        points = [*self.times["all_low"], *self.times.get(UNSERVED.get(router, router), [])]
        if router == "all_low":
            points = points[:1]
        shares = [*(share for share, _ in points), 1.0]
        turns = zip(*(times for _, times in points), strict=True)
        return [1 / float(np.interp(high_frac, shares, [*turn, 1.0])) for turn in turns]


def measure_speeds(bench: Bench, layers: Sequence[int], dtype: str = "bfloat16") -> Speeds:
    """Runs a prompt of the first text on one engine per router and share, thresholds set on that prompt.

    Args:
        bench: routers and sizes.
        layers: the neediest first, for the map of layers.
        dtype: of the high path.
    """
    sizes, model = bench.sizes, bench.model.astype(dtype)
    pool = build_pool(bench.executor, model)
    ids = some_ids(bench)[: sizes.chunk_tokens]
    routers = _routers(bench, ids, layers)
    serve = partial(LLM, model, executors=pool, options=EngineOptions(dispatch="mixed"))
    llms = {"all_high": serve(router="all_high")} | {
        f"{name} {share:g}": serve(router=router)
        for name, by_share in routers.items()
        for share, router in by_share
    }
    seconds = timing.take_turns(
        timing.prefill_runs(llms, ids), sizes.turns, title=f"prefill of {len(ids)} tokens"
    )
    high_s = seconds["all_high"]
    return Speeds(
        all_high_tok_s=spread([len(ids) / s for s in high_s]),
        times={
            name: [
                (
                    share,
                    [
                        own / high
                        for own, high in zip(seconds[f"{name} {share:g}"], high_s, strict=True)
                    ],
                )
                for share, _ in by_share
            ]
            for name, by_share in routers.items()
        },
    )


def _routers(
    bench: Bench, ids: Sequence[int], layers: Sequence[int]
) -> dict[str, list[tuple[float, Router]]]:
    """By name, the share of the high work in a prompt and the router that gives it."""
    batch = decided(ids, Phase.PREFILL, bench.types)
    found: dict[str, list[tuple[float, Router]]] = {"all_low": [(0.0, AllLowRouter())]}
    for share in bench.sizes.shares:
        count = num_high_layers(share, len(layers))
        fixed = LayerwiseRouter(high_layers=list(layers[:count]))
        found.setdefault("layerwise", []).append((count / len(layers), fixed))
        for name, router in ({"random": RandomRouter(share)} | bench.scored(share)).items():
            inputs = shown(router, batch, bench.types, None)
            router.calibrate([inputs])
            high_T = router.high_work(router.route(inputs).route_T)
            found.setdefault(name, []).append((float(high_T.mean()), router))
    return found
