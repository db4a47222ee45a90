"""KL of every routing, window by window.

N tokens of a window that a phase decides, B routings of it, W windows, L layers, E hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenrouter.evaluation.progress import progress
from tokenrouter.training.gradients import HEAD_ROWS, DifferentiableDecoder
from tokenrouter.training.labels.fisher import Fisher
from tokenrouter.types import Phase

from .asking import (
    Routers,
    calibrated,
    decided,
    first_decided,
    logit_signals,
    low_layers,
    shown,
    with_thresholds,
)
from .routings import Key, Routing, all_low, asked, layer_order, routings
from .setup import PLAIN, SMOOTH, Bench, Text

BATCH = 4
SMOOTH_SHARE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One router at one share in one phase, on one text.

    Attributes:
        kl_WN: float32, nats, of the distribution behind every token; of random: the expectation.
        high_frac_W, auroc_W, recall_W: per window, see ``Routing``.
    """

    kl_WN: Tensor
    high_frac_W: Tensor
    auroc_W: Tensor
    recall_W: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Smoothed:
    """The smoothed path with a learned 5 % beside the plain path's all_low.

    Attributes:
        kl_W: float32, nats, mean of each window.
        plain_low_W: the same of all_low on the plain path.
        high_frac: share of high tokens.
    """

    kl_W: Tensor
    plain_low_W: Tensor
    high_frac: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TextMeasured:
    """What a text shows.

    Attributes:
        by_key: every router at every share in each phase.
        layers: the neediest first, by the labels that the mlp has learned from; by these windows' where it has none.
    """

    by_key: dict[Key, Measured]
    layers: list[int]


def measure_text(bench: Bench, text: Text) -> TextMeasured:
    """KL of every router at every share in each phase: the KL of a routing is the same in both, the choice is not."""
    decoder = bench.decoders[bench.executor]
    maker = Fisher(draws=bench.sizes.draws)
    labels_NL = []
    with progress(f"{text.name}: labels", len(text.windows), unit="windows") as advance:
        for seed, ids in enumerate(text.windows):
            labels_NL.append(maker(decoder, torch.tensor(ids), seed))
            advance()
    routers, layers = calibrated(bench, text), bench.layer_order or layer_order(labels_NL)
    found: dict[Key, list[Measured]] = {}
    with progress(f"{text.name}: KL", len(text.windows), unit="windows") as advance:
        for ids, label_NL in zip(text.windows, labels_NL, strict=True):
            answers = _answers(bench, ids, label_NL, routers, layers)
            for key, measured in means(answers, kl_nats(decoder, ids, answers)).items():
                found.setdefault(key, []).append(measured)
            advance()
    by_key = {key: _stack(windows) for key, windows in found.items()}
    return TextMeasured(by_key=by_key, layers=layers)


def _answers(
    bench: Bench, ids: Sequence[int], label_NL: Tensor, routers: Routers, layers: Sequence[int]
) -> list[Routing]:
    """All routings of a window, of both phases."""
    signals = logit_signals(bench, ids)
    windows = [asked(bench, ids, label_NL, signals, phase) for phase in bench.phases]
    return [answer for window in windows for answer in routings(bench, window, routers, layers)]


def measure_smoothed(bench: Bench, text: Text) -> Smoothed | None:
    """None where there is no trained mlp for the smoothed path."""
    if "mlp" not in bench.trained.get(SMOOTH, {}):
        return None
    router = with_thresholds(bench, text, bench.learned("mlp", SMOOTH, SMOOTH_SHARE), {})
    kl, plain_low, shares = [], [], []
    with progress(f"{text.name}: smoothed", len(text.windows), unit="windows") as advance:
        for ids in text.windows:
            inputs = shown(router, decided(ids, Phase.PREFILL, bench.types), bench.types, None)
            route_N = router.route(inputs).route_T
            routed = Routing(
                phase=Phase.PREFILL,
                router="mlp",
                pick="threshold",
                share=SMOOTH_SHARE,
                is_low_LN=low_layers(router, route_N, bench.model.config.num_layers),
            )
            kl.append(kl_nats(bench.decoders[SMOOTH], ids, [routed]).mean())
            plain_low.append(kl_nats(bench.decoders[PLAIN], ids, [all_low()]).mean())
            shares.append(routed.high_frac)
            advance()
    return Smoothed(
        kl_W=torch.stack(kl),
        plain_low_W=torch.stack(plain_low),
        high_frac=sum(shares) / len(shares),
    )


def kl_nats(
    decoder: DifferentiableDecoder, ids: Sequence[int], answers: Sequence[Routing]
) -> Tensor:
    """KL(all high || routed) behind every token of the window, float32 ``[B, N]``.

    Args:
        decoder: of the low path.
        ids: of the window.
        answers: B routings.
    """
    ids_N, num_layers = torch.tensor(ids), decoder.config.num_layers
    high_NE = decoder.trace(ids_N).inputs[-1]
    parts = []
    for start in range(0, len(answers), BATCH):
        some = answers[start : start + BATCH]
        is_low_BLN = torch.stack([a.is_low_LN.expand(num_layers, len(ids)) for a in some])
        parts.append(_kl(decoder, high_NE, decoder.routed(ids_N, is_low_BLN)))
    return torch.cat(parts)


def _kl(decoder: DifferentiableDecoder, high_NE: Tensor, hidden_BNE: Tensor) -> Tensor:
    """A few rows of logits at a time, the reference's once for all routings."""
    parts = []
    for high_RE, hidden_BRE in zip(
        high_NE.split(HEAD_ROWS), hidden_BNE.split(HEAD_ROWS, 1), strict=True
    ):
        logp_RV = decoder.logits(high_RE).log_softmax(-1)
        p_RV = logp_RV.exp()
        logq = (decoder.logits(hidden_RE).log_softmax(-1) for hidden_RE in hidden_BRE)
        parts.append(torch.stack([torch.linalg.vecdot(p_RV, logp_RV - q_RV) for q_RV in logq]))
    return torch.cat(parts, 1).clamp_min_(0.0)


def means(answers: Sequence[Routing], kl_BN: Tensor) -> dict[Key, Measured]:
    """One entry per router, share and phase, of one window; of the tokens that the phase decides."""
    rows: dict[Key, list[int]] = {}
    for row, answer in enumerate(answers):
        rows.setdefault(answer.key, []).append(row)

    def weights(some: Sequence[int]) -> Tensor:
        weight_B = torch.tensor([answers[row].weight for row in some], dtype=torch.float64)
        return weight_B / weight_B.sum()

    def mean(name: str, some: Sequence[int]) -> Tensor:
        value_B = torch.tensor([getattr(answers[row], name) for row in some], dtype=torch.float64)
        return value_B @ weights(some)

    return {
        key: Measured(
            kl_WN=weights(some).float() @ kl_BN[some, first_decided(key[0]) :],
            high_frac_W=mean("high_frac", some),
            auroc_W=mean("auroc", some),
            recall_W=mean("recall", some),
        )
        for key, some in rows.items()
    }


def _stack(windows: Sequence[Measured]) -> Measured:
    return Measured(
        **{name: torch.stack([getattr(w, name) for w in windows]) for name in Measured.__slots__}
    )
