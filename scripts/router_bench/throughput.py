"""How fast an engine runs a prompt, or requests that decode, with each router at each share, router included.

Every token runs in every step, on mixed forwards. The high path is bfloat16, as it is served. All systems take
turns, so that drift of the machine hits all alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from tokenrouter import LLM
from tokenrouter.engine import EngineOptions
from tokenrouter.evaluation import ratios as timing
from tokenrouter.executors import build_pool
from tokenrouter.routers import AllLowRouter, LayerwiseRouter, RandomRouter, Router
from tokenrouter.telemetry import Spread, spread
from tokenrouter.types import Phase
from tokenrouter.wording import counted

from .asking import decided, logit_signals, shown
from .cost import some_ids, spread_prompts
from .routings import num_high_layers
from .setup import Bench

UNSERVED = {"oracle": "random"}
"""The oracle knows what no engine does: it is as fast as random, whose decision costs next to nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Prefill of one prompt, or decode of several requests, by router.

    Attributes:
        all_high_tok_s: tokens per second of all_high.
        times: by router, from the smallest share on: the share of the high work, and per turn the time as a multiple
            of all_high's in the same turn. ``all_low`` has one entry.
    """

    all_high_tok_s: Spread
    times: Mapping[str, Sequence[tuple[float, Sequence[float]]]]

    @property
    def routers(self) -> frozenset[str]:
        """Those whose throughput is known: all that were run, and such as are as fast as one of them."""
        return frozenset([*self.times, *UNSERVED])

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


def measure_speeds(
    bench: Bench, layers: Sequence[int], phase: Phase, dtype: str = "bfloat16"
) -> Speeds:
    """Runs a prompt of the first text, or several requests behind prompts of it, on an engine per router and share.

    Thresholds are set on that text. What is generated may have another share of high work, which is counted.

    Args:
        bench: routers and sizes.
        layers: the neediest first, for the map of layers.
        phase: that is timed.
        dtype: of the high path.
    """
    sizes, model = bench.sizes, bench.model.astype(dtype)
    pool = build_pool(bench.executor, model)
    ids = some_ids(bench)
    routers = _routers(bench, ids[: sizes.chunk_tokens], layers, phase)
    serve = partial(LLM, model, executors=pool, options=EngineOptions(dispatch="mixed"))
    llms = {"all_high": serve(router="all_high")} | {
        f"{name} {share:g}": serve(router=router)
        for name, by_share in routers.items()
        for share, router in by_share
    }
    if phase == Phase.PREFILL:
        ids, num_tokens = ids[: sizes.chunk_tokens], sizes.chunk_tokens
        runs, title = timing.prefill_runs(llms, ids), f"prefill of {num_tokens} tokens"
        seconds = timing.take_turns(runs, sizes.turns, title=title)
    else:
        num_tokens = sizes.decode_batch
        prompts = spread_prompts(ids, sizes.context, num_tokens)
        seconds = timing.decode_turns(
            llms,
            prompts,
            sizes.turns,
            num_steps=sizes.decode_steps,
            title=f"decode of {counted(num_tokens, 'request')}",
        )
    high_s = seconds["all_high"]
    times: dict[str, list[tuple[float, Sequence[float]]]] = {}
    for name, by_share in routers.items():
        for share, _ in by_share:
            key = f"{name} {share:g}"
            turns = [own / high for own, high in zip(seconds[key], high_s, strict=True)]
            served = share if phase == Phase.PREFILL else _decoded_share(llms[key], share)
            times.setdefault(name, []).append((served, turns))
    return Speeds(
        all_high_tok_s=spread([num_tokens / s for s in high_s]),
        times={name: sorted(points, key=lambda point: point[0]) for name, points in times.items()},
    )


def _decoded_share(llm: LLM, asked: float) -> float:
    """Share of the high work of what was decoded; a fixed map's is known."""
    if llm.router.only_route is not None:
        return asked
    by_route = llm.engine.stats.requested_tokens[Phase.DECODE]
    work_R = llm.router.high_work(torch.arange(len(by_route))).numpy()
    return float(work_R @ by_route / by_route.sum())


def _routers(
    bench: Bench, ids: Sequence[int], layers: Sequence[int], phase: Phase
) -> dict[str, list[tuple[float, Router]]]:
    """By name, the share of the high work in a text and the router that gives it."""
    signals = {Phase.PREFILL: None, Phase.DECODE: logit_signals(bench, ids)}
    found: dict[str, list[tuple[float, Router]]] = {"all_low": [(0.0, AllLowRouter())]}
    for share in bench.sizes.shares:
        count = num_high_layers(share, len(layers))
        fixed = LayerwiseRouter(high_layers=list(layers[:count]))
        found.setdefault("layerwise", []).append((count / len(layers), fixed))
        for name, router in ({"random": RandomRouter(share)} | bench.scored(share)).items():
            inputs = {
                of: shown(router, decided(ids, of, bench.types), bench.types, signals[of])
                for of in Phase
            }
            router.calibrate(list(inputs.values()))
            high_T = router.high_work(router.route(inputs[phase]).route_T)
            found.setdefault(name, []).append((float(high_T.mean()), router))
    return found
