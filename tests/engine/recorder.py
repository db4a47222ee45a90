"""A router that keeps what it is shown: what features are told of tokens that are served.

N tokens of a request, S features.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.engine.tools import tiny
from tokenrouter import LLM, EngineOptions
from tokenrouter.features import sequence_batch
from tokenrouter.features.signals import LOGIT_SIGNALS
from tokenrouter.routers import Router
from tokenrouter.types import Phase, RouteInput, RoutingDecision


class Recorder(Router):
    """Keeps what it is shown of each token, by the hash of its prefix; everything goes high."""

    name = "recorder"
    phases = frozenset({Phase.DECODE})

    def __init__(self, features: Sequence[str] = LOGIT_SIGNALS) -> None:
        self.features = tuple(features)
        self.seen: dict[int, list[list[float]]] = {}

    @property
    def options(self) -> dict[str, object]:
        return {}

    def route(self, inputs: RouteInput) -> RoutingDecision:
        for prefix, values in zip(
            inputs.prefix_hash_T.tolist(), inputs.values_TF.tolist(), strict=True
        ):
            self.seen.setdefault(prefix, []).append(values)
        return RoutingDecision.constant(0, len(inputs), "recorded")

    def values_of(self, ids: Sequence[int], prompt_len: int) -> Tensor:
        """``[N, S]`` of the tokens behind the prompt; each was shown once, or by several requests the same."""
        hashes = sequence_batch(ids).prefix_hash_T[prompt_len:].tolist()
        return torch.tensor([self.seen[h][0] for h in hashes])


def recording(features: Sequence[str] = LOGIT_SIGNALS, **options: Any) -> tuple[LLM, Recorder]:
    router = Recorder(features)
    return LLM(tiny(), router=router, options=EngineOptions(**options)), router
