"""Which tokens and layers every router sends high in a window.

N tokens of a window, L layers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tokenrouter.evaluation.router_scores import NEEDY_FRAC, auroc, recall, top_share
from tokenrouter.features import FeatureExtractor, TokenTypeTable, sequence_batch
from tokenrouter.routers import HIGH, RandomRouter, Router

from .setup import Bench, Text

Pick = Literal["threshold", "rank", "exact"]
Routers = Mapping[float, Mapping[str, Router]]
"""Calibrated routers by share and name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """One router's answer for one window.

    Attributes:
        router: its name.
        pick: how tokens are picked, see the script.
        share: of high tokens that was asked for.
        is_low_LN: bool; L may be 1, which counts for all layers, and so may N.
        auroc: of the score against the 10 % largest labels; NaN without a score.
        recall: of as many of the largest labels as the share; NaN where not tokens are picked.
        weight: in the mean over the routings of one key.
    """

    router: str
    pick: Pick
    share: float
    is_low_LN: Tensor
    auroc: float = math.nan
    recall: float = math.nan
    weight: float = 1.0

    @property
    def key(self) -> tuple[str, Pick, float]:
        """Equal for the seeds of random, which count as one router."""
        return self.router, self.pick, self.share

    @property
    def high_frac(self) -> float:
        """Share of the high work: of the tokens, or of the layers."""
        return 1.0 - float(self.is_low_LN.double().mean())


def calibrated(bench: Bench, text: Text) -> dict[float, dict[str, Router]]:
    """Rule and the trained routers with thresholds set on the text's calibration side."""
    return {
        share: {
            name: text.held_out.calibrated(router, bench.types)
            for name, router in bench.scored(share).items()
        }
        for share in bench.sizes.shares
    }


def layer_order(labels_NL: Sequence[Tensor]) -> list[int]:
    """Layers by their labels' sum over windows, the neediest first."""
    total_L = torch.stack([label_NL.sum(0) for label_NL in labels_NL]).sum(0)
    order: list[int] = total_L.argsort(descending=True, stable=True).tolist()
    return order


def all_low() -> Routing:
    """Nothing high."""
    return Routing(router="all_low", pick="exact", share=0.0, is_low_LN=torch.ones(1, 1).bool())


def routings(
    bench: Bench, ids: Sequence[int], label_NL: Tensor, routers: Routers, layers: Sequence[int]
) -> list[Routing]:
    """All routers' answers for a window.

    Args:
        bench: sizes and types.
        ids: the window's tokens, all of them a prompt.
        label_NL: the oracle's.
        routers: see ``calibrated``.
        layers: see ``layer_order``.
    """
    label_N = label_NL.sum(1)
    found = [all_low()]
    for share, by_name in routers.items():
        found.append(_layerwise(share, layers))
        found.append(
            _of_tokens("oracle", "exact", share, label_N, top_share(label_N, share), label_N)
        )
        for seed in range(bench.sizes.seeds):
            score_N, _ = _answer(RandomRouter(share, seed), ids, bench.types)
            found += _both_firsts(share, score_N, label_N)
        for name, router in by_name.items():
            score_N, is_high_N = _answer(router, ids, bench.types)
            found.append(_of_tokens(name, "threshold", share, score_N, is_high_N, label_N))
            ranked_N = top_share(score_N, share)
            found.append(_of_tokens(name, "rank", share, score_N, ranked_N, label_N))
    return found


def is_high(router: Router, ids: Sequence[int], types: TokenTypeTable) -> Tensor:
    """Which tokens of a prompt a calibrated router sends high, bool ``[N]``."""
    return _answer(router, ids, types)[1]


def _answer(router: Router, ids: Sequence[int], types: TokenTypeTable) -> tuple[Tensor, Tensor]:
    """Scores, and which tokens go high."""
    batch = sequence_batch(ids, token_types=types)
    decision = router.route(FeatureExtractor(router.features, types).extract(batch))
    return decision.score_T, decision.route_T == HIGH


def _of_tokens(
    router: str, pick: Pick, share: float, score_N: Tensor, is_high_N: Tensor, label_N: Tensor
) -> Routing:
    return Routing(
        router=router,
        pick=pick,
        share=share,
        is_low_LN=~is_high_N[None],
        auroc=auroc(score_N, top_share(label_N, NEEDY_FRAC)),
        recall=recall(is_high_N, top_share(label_N, share)),
    )


def _both_firsts(share: float, score_N: Tensor, label_N: Tensor) -> list[Routing]:
    """A random choice with the window's first token low and with it high, weighed by the chance of each.

    That token alone is worth as much as a large part of an oracle's gain, so a mean over a few seeds would be the luck
    of how many of them hold it.
    """
    found = []
    for first, weight in ((-1.0, 1.0 - share), (2.0, share)):  # below and above all draws
        drawn_N = score_N.clone()
        drawn_N[0] = first
        routing = _of_tokens("random", "exact", share, drawn_N, top_share(drawn_N, share), label_N)
        found.append(replace(routing, weight=weight))
    return found


def _layerwise(share: float, layers: Sequence[int]) -> Routing:
    num_high = math.ceil(round(share * len(layers), 6))
    is_low_L1 = torch.ones(len(layers), 1, dtype=torch.bool)
    is_low_L1[list(layers[:num_high])] = False
    return Routing(router="layerwise", pick="exact", share=share, is_low_LN=is_low_L1)
