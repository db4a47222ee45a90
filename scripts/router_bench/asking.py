"""What routers are asked in each phase, and the thresholds that they answer by.

In prefill a window is a prompt. In decode its first token is one, high for every router, and the others are fed one by
one, so that the logits before each are known: those of the high path, in one pass, which differ from those of the path
that a router's tokens took by about what routing changes in them.
"""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tokenrouter.features import (
    Signals,
    TextSignals,
    TokenTypeTable,
    needs_signals,
    sequence_batch,
)
from tokenrouter.routers import HIGH, Budget, EntropyRouter, Router
from tokenrouter.training.entropies import previous_logits
from tokenrouter.types import Phase, RouteInput, TokenBatch

from .setup import Bench, Text

Routers = Mapping[float, Mapping[str, Router]]
"""Calibrated routers by share and name."""


def first_decided(phase: Phase) -> int:
    """Position of the first token that is decided in a phase, and that KL is of."""
    return int(phase == Phase.DECODE)


def decided(ids: Sequence[int], phase: Phase, types: TokenTypeTable) -> TokenBatch:
    """The tokens of a window that are decided in a phase."""
    if phase == Phase.PREFILL:
        return sequence_batch(ids, token_types=types)
    return sequence_batch(ids, prompt_len=1, token_types=types).select(torch.arange(1, len(ids)))


def shown(
    router: Router, batch: TokenBatch, types: TokenTypeTable, signals: Signals | None
) -> RouteInput:
    """What a router sees of tokens."""
    return router.extractor(types, signals).extract(batch)


def logit_signals(bench: Bench, ids: Sequence[int]) -> TextSignals:
    """What the logits before each token of a window say, of the high path."""
    decoder = bench.decoders[bench.executor]
    return TextSignals(bench.types, previous_logits(decoder, decoder.trace(torch.tensor(ids))))


def is_high(router: Router, ids: Sequence[int], types: TokenTypeTable) -> Tensor:
    """Which tokens of a prompt a calibrated router sends high in all layers, bool ``[N]``."""
    return (
        router.route(shown(router, decided(ids, Phase.PREFILL, types), types, None)).route_T == HIGH
    )


def low_layers(router: Router, route_T: Tensor, num_layers: int) -> Tensor:
    """Which layers of tokens are low by their routes, bool ``[L, T]``."""
    is_low_RL = torch.tensor(
        [
            [route.executor_at(layer) == "low" for layer in range(num_layers)]
            for route in router.routes(num_layers).routes
        ]
    )
    return is_low_RL[route_T].t()


def calibrated(bench: Bench, text: Text) -> dict[float, dict[str, Router]]:
    """Rule, entropy and the trained routers with thresholds set on the text's calibration side.

    Those that look at logits see them on few passages, ``Sizes.logit_passages``.
    """
    passages = text.held_out.passages()
    some = passages[:: max(1, len(passages) // bench.sizes.logit_passages)]
    known = {tuple(ids): logit_signals(bench, ids) for ids in some}
    found: dict[float, dict[str, Router]] = {}
    for share in bench.sizes.shares:
        routers = bench.scored(share)
        if "entropy" in bench.compared and Phase.DECODE in bench.phases:
            routers["entropy"] = EntropyRouter(budget=Budget(high_frac=share))
        found[share] = {name: with_thresholds(bench, text, r, known) for name, r in routers.items()}
    return found


def with_thresholds(
    bench: Bench, text: Text, router: Router, known: Mapping[tuple[int, ...], Signals]
) -> Router:
    """A copy of ``router`` with thresholds for the text's windows.

    Args:
        bench: types.
        text: whose calibration side is looked at.
        router: with a budget.
        known: passages on which a router that looks at logits sees them; none: it is not asked in decode.
    """
    if not needs_signals(router.features):
        return text.held_out.calibrated(router, bench.types)
    router, inputs = copy.deepcopy(router), []
    if Phase.PREFILL in router.phases:
        prompts = [decided(ids, Phase.PREFILL, bench.types) for ids in text.held_out.passages()]
        inputs += [shown(router, batch, bench.types, None) for batch in prompts]
    for ids, signals in known.items():
        batch = decided(ids, Phase.DECODE, bench.types)
        inputs.append(shown(router, batch, bench.types, signals))
    router.calibrate(inputs)
    return router
