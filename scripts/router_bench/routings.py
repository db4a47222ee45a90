"""Which tokens and layers every router sends high in a window, in each phase; see ``asking`` for what a phase is.

N tokens of a window, M of them that are decided in a phase, L layers.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tokenrouter.evaluation.router_scores import NEEDY_FRAC, auroc, recall, top_share
from tokenrouter.features import Signals, TokenTypeTable
from tokenrouter.routers import LearnedRouter, RandomRouter, Router
from tokenrouter.types import Phase, TokenBatch

from .asking import Routers, decided, first_decided, low_layers, shown
from .setup import Bench

Pick = Literal["threshold", "rank", "exact"]
Key = tuple[Phase, str, Pick, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """One router's answer for one window.

    Attributes:
        phase: whose tokens the router was asked about.
        router: its name.
        pick: how tokens are picked, see the script.
        share: of high tokens that was asked for.
        is_low_LN: bool; L may be 1, which counts for all layers, and so may N.
        auroc: of the score against the 10 % largest labels; NaN without a score of the token.
        recall: of as many of the largest labels as the share; NaN where not tokens are picked.
        weight: in the mean over the routings of one key.
    """

    phase: Phase
    router: str
    pick: Pick
    share: float
    is_low_LN: Tensor
    auroc: float = math.nan
    recall: float = math.nan
    weight: float = 1.0

    @property
    def key(self) -> Key:
        """Equal for the seeds of random, which count as one router."""
        return self.phase, self.router, self.pick, self.share

    @property
    def high_frac(self) -> float:
        """Share of the high work among what is decided: of the tokens, or of the layers."""
        return 1.0 - float(self.is_low_LN[:, first_decided(self.phase) :].double().mean())


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The tokens of a window that are decided in a phase, as routers are asked about them.

    Attributes:
        batch: M tokens.
        label_M: the oracle's.
        signals: of the whole window.
        types: of the vocabulary.
    """

    phase: Phase
    batch: TokenBatch
    label_M: Tensor
    signals: Signals
    types: TokenTypeTable

    def answer(self, router: Router) -> tuple[Tensor, Tensor]:
        """Scores, float32 ``[L, M]``, and what goes high, bool ``[L, M]``; L is 1 where all layers go one way."""
        inputs = shown(router, self.batch, self.types, self.signals)
        decision = router.route(inputs)
        score_LM = decision.score_T[None]
        if isinstance(router, LearnedRouter):
            score_LM = router.layer_scores(inputs).t()
        return score_LM, ~low_layers(router, decision.route_T, len(score_LM))

    def layers(self, router: str, share: float, is_low_L1: Tensor) -> Routing:
        """Every decided token takes the same layers low."""
        return Routing(
            phase=self.phase,
            router=router,
            pick="exact",
            share=share,
            is_low_LN=self._in_window(is_low_L1.expand(-1, len(self.batch))),
        )

    def tokens(
        self, router: str, pick: Pick, share: float, score_LM: Tensor, is_high_LM: Tensor
    ) -> Routing:
        """The tokens of a choice, or their layers."""
        routing = Routing(
            phase=self.phase,
            router=router,
            pick=pick,
            share=share,
            is_low_LN=self._in_window(~is_high_LM),
        )
        if len(score_LM) > 1:
            return routing
        return replace(
            routing,
            auroc=auroc(score_LM[0], top_share(self.label_M, NEEDY_FRAC)),
            recall=recall(is_high_LM[0], top_share(self.label_M, share)),
        )

    def _in_window(self, is_low_LM: Tensor) -> Tensor:
        prompt = torch.zeros(len(is_low_LM), first_decided(self.phase), dtype=torch.bool)
        return torch.cat([prompt, is_low_LM], 1)


def asked(
    bench: Bench, ids: Sequence[int], label_NL: Tensor, signals: Signals, phase: Phase
) -> Asked:
    """A window as a phase sees it.

    Args:
        bench: types.
        ids: the window's tokens.
        label_NL: the oracle's.
        signals: of the window, see ``asking.logit_signals``.
        phase: of the tokens that are decided.
    """
    return Asked(
        phase=phase,
        batch=decided(ids, phase, bench.types),
        label_M=label_NL.sum(1)[first_decided(phase) :],
        signals=signals,
        types=bench.types,
    )


def layer_order(labels_NL: Sequence[Tensor]) -> list[int]:
    """Layers by their labels' sum over windows, the neediest first."""
    total_L = sum((label_NL.sum(0) for label_NL in labels_NL), torch.zeros(1))
    return total_L.argsort(descending=True, stable=True).tolist()


def all_low() -> Routing:
    """A prompt without any high work."""
    is_low_11 = torch.ones(1, 1, dtype=torch.bool)
    return Routing(
        phase=Phase.PREFILL, router="all_low", pick="exact", share=0.0, is_low_LN=is_low_11
    )


def routings(
    bench: Bench, window: Asked, routers: Routers, layers: Sequence[int]
) -> Iterator[Routing]:
    """All routers' answers for a window in one phase.

    Args:
        bench: sizes.
        window: the tokens that are decided.
        routers: see ``asking.calibrated``; those that do not decide the phase are left out.
        layers: see ``layer_order``.
    """
    yield window.layers("all_low", 0.0, torch.ones(1, 1, dtype=torch.bool))
    for share, by_name in routers.items():
        yield window.layers("layerwise", share, layer_map(share, layers))
        label_1M = window.label_M[None]
        yield window.tokens("oracle", "exact", share, label_1M, top_work(label_1M, share))
        for seed in range(bench.sizes.seeds):
            yield from _random(window, share, window.answer(RandomRouter(share, seed))[0])
        for name, router in by_name.items():
            if window.phase not in router.phases:
                continue
            score_LM, is_high_LM = window.answer(router)
            yield window.tokens(name, "threshold", share, score_LM, is_high_LM)
            yield window.tokens(name, "rank", share, score_LM, top_work(score_LM, share))


def top_work(score_LM: Tensor, share: float) -> Tensor:
    """Bool ``[L, M]``: the largest scores, ``share`` of the work (tokens times layers), the earlier token first."""
    return top_share(score_LM.t().flatten(), share).view(score_LM.t().shape).t()


def layer_map(share: float, layers: Sequence[int]) -> Tensor:
    """Which layers are low, bool ``[L, 1]``, where at least ``share`` of them is high.

    Args:
        share: of high layers.
        layers: the neediest first.
    """
    is_low_L1 = torch.ones(len(layers), 1, dtype=torch.bool)
    is_low_L1[list(layers[: num_high_layers(share, len(layers))])] = False
    return is_low_L1


def num_high_layers(share: float, num_layers: int) -> int:
    """As few whole layers as are at least ``share``."""
    return math.ceil(round(share * num_layers, 6))


def _random(window: Asked, share: float, score_1M: Tensor) -> Iterator[Routing]:
    """A random choice; where a window's first token is decided, with it low and high, weighed by the chance of each.

    That token alone is worth as much as a large part of an oracle's gain, so a mean over a few seeds would be the luck
    of how many of them hold it.
    """
    firsts = ((-1.0, 1.0 - share), (2.0, share))  # below and above all draws
    for first, weight in firsts if window.phase == Phase.PREFILL else ((None, 1.0),):
        drawn_1M = score_1M.clone()
        if first is not None:
            drawn_1M[0, 0] = first
        routing = window.tokens("random", "exact", share, drawn_1M, top_work(drawn_1M, share))
        yield replace(routing, weight=weight)
