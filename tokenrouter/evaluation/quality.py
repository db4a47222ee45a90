"""Quality of a routed run: KL(reference || run), full vocabulary, teacher-forced, both phases.

Forced prefill sends a window through prefill chunks. Forced decode prefills a window up to its last tokens and feeds
those one by one through the serving path, several windows in one batch. The reference's distributions of one window are
computed once and compared with every system before the next, so that memory stays at one window's logits.

Shape letters: T rows given at once, N tokens of a window, V vocabulary.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tokenrouter import LLM
from tokenrouter.checks import check_integer
from tokenrouter.engine import EngineStats
from tokenrouter.engine.llm import ScoreSink
from tokenrouter.evaluation.divergence import Ints, TokenScores, compare_rows, mix
from tokenrouter.evaluation.progress import Tick, progress
from tokenrouter.evaluation.shares import high_layers
from tokenrouter.types import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class QualitySettings:
    """How much is compared.

    Attributes:
        window_tokens: length of a window.
        num_windows: windows of forced prefill.
        decode_tokens: last tokens of a window that forced decode feeds one by one; 0 leaves that phase out.
        decode_windows: how many of the windows are decoded, in one batch.

    Raises:
        ValueError: a value that is no integer, or outside its range.
    """

    window_tokens: int
    num_windows: int
    decode_tokens: int
    decode_windows: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            check_integer(f"evaluation.{name}", getattr(self, name))
        if self.window_tokens < 2 or self.num_windows < 1:
            raise ValueError(
                "evaluation needs window_tokens >= 2 and num_windows >= 1, got "
                f"{self.window_tokens} and {self.num_windows}"
            )
        if not 0 <= self.decode_tokens < self.window_tokens:
            raise ValueError(
                f"evaluation.decode_tokens must be in 0..{self.window_tokens - 1}: a window of "
                f"{self.window_tokens} tokens needs a prefix; got {self.decode_tokens}"
            )
        if not 0 <= self.decode_windows <= self.num_windows:
            raise ValueError(
                f"evaluation.decode_windows must be in 0..{self.num_windows} (num_windows), "
                f"got {self.decode_windows}"
            )

    @property
    def decodes(self) -> bool:
        """Whether forced decode runs."""
        return self.decode_tokens > 0 and self.decode_windows > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """What one engine counted while it scored in one phase.

    Attributes:
        phase: of the scored tokens.
        side: the system whose engine it was, where scores are computed from those of two; None: the scored one's own.
        stats: its counters: of each window in forced prefill, of the one batch in forced decode.
    """

    phase: Phase
    side: str | None = None
    stats: tuple[EngineStats, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """One system's scores.

    Attributes:
        prefill: every token of every window, forced prefill.
        decode: the last tokens of some windows, forced decode; None where it was left out.
        high_frac: share of the work (tokens times layers) on the executor "high" in forced prefill.
        decode_high_frac: the same in forced decode; None where it was left out.
        routes: by route name its shares of the scored tokens: ``prefill_token_frac``, and ``decode_token_frac`` if any.
        scorings: what was counted meanwhile, by phase and engine.
    """

    prefill: TokenScores
    decode: TokenScores | None
    high_frac: float
    decode_high_frac: float | None
    routes: dict[str, dict[str, float]]
    scorings: tuple[Scoring, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityReport:
    """The reference's own scores (KL 0 by definition; its perplexity) and those of each system."""

    reference: TokenScores
    systems: dict[str, Quality]


def measure_quality(
    reference: LLM,
    systems: Mapping[str, LLM],
    windows: Sequence[list[int]],
    settings: QualitySettings,
) -> QualityReport:
    """Compare every system with the reference on the same windows, in lockstep.

    Args:
        reference: the yardstick, e.g. float32, all high.
        systems: what to compare, by name. Their engines' counters start anew.
        windows: token ids, ``settings.window_tokens`` each.
        settings: how much.

    Raises:
        ValueError: no windows, or a window that an engine refuses.
    """
    collected = {name: _Collected(llm, Phase.PREFILL) for name, llm in systems.items()}
    own, tails_TV = _Collected(reference, Phase.PREFILL), []
    decode_ids = list(windows[: settings.decode_windows]) if settings.decodes else []
    total = sum(map(len, windows)) * (1 + len(systems))
    total += sum(map(len, decode_ids)) * len(systems)
    with progress("quality", total, unit="tokens") as advance:
        for index, window in enumerate(windows):
            logp_NV = _reference_logp(reference, window, partial(advance, "reference"))
            own.add(index, 0, logp_NV, logp_NV, window)
            for name, record in collected.items():
                tick = partial(advance, f"{name}, window {index + 1}")
                record.score_prefill(index, window, logp_NV, tick)
            if index < len(decode_ids):
                tails_TV.append(logp_NV[-settings.decode_tokens :].clone())
        decoded: dict[str, _Collected] = {}
        for name, llm in systems.items() if decode_ids else ():
            decoded[name] = _Collected(llm, Phase.DECODE)
            decoded[name].score_decode(decode_ids, tails_TV, partial(advance, f"{name}, decode"))
    qualities = {name: _quality(part, decoded.get(name)) for name, part in collected.items()}
    return QualityReport(reference=own.scores(), systems=qualities)


def _quality(prefill: "_Collected", decode: "_Collected | None") -> Quality:
    routes = {name: {"prefill_token_frac": share} for name, share in prefill.route_fracs().items()}
    for name, share in decode.route_fracs().items() if decode else ():
        routes[name]["decode_token_frac"] = share
    return Quality(
        prefill=prefill.scores(),
        decode=decode.scores() if decode else None,
        high_frac=prefill.high_frac,
        decode_high_frac=decode.high_frac if decode else None,
        routes=routes,
        scorings=tuple(part.scoring() for part in (prefill, decode) if part),
    )


def request_level_quality(
    high: Quality, low: Quality, shares: Sequence[float], high_frac: float
) -> Quality:
    """What a router reaches that sends whole windows high, up to ``high_frac`` of all tokens.

    A window is one request, so such a router's scores are all_high's on some windows and all_low's on the others. A
    run of its own would compute the same numbers again, and with a few windows it could not meet the share. Here the
    window on the threshold counts as both, in proportion, so that the share of high tokens is met exactly, in each
    phase among the windows that it has.

    Args:
        high: scores of all_high.
        low: scores of all_low.
        shares: per window its share of tokens in need of the high path; the largest go first.
        high_frac: share of tokens that run high, 0 to 1.
    """
    prefill = mix(high.prefill, low.prefill, _apportion(shares, high_frac))
    phases, decode = ["prefill"], None
    if high.decode is not None and low.decode is not None:
        decoded = shares[: int(high.decode.window.max()) + 1]
        decode = mix(high.decode, low.decode, _apportion(decoded, high_frac))
        phases.append("decode")
    return Quality(
        prefill=prefill,
        decode=decode,
        high_frac=high_frac,
        decode_high_frac=None if decode is None else high_frac,
        routes={
            name: dict.fromkeys([f"{phase}_token_frac" for phase in phases], share)
            for name, share in (("high", high_frac), ("low", 1.0 - high_frac))
        },
        scorings=tuple(
            replace(scoring, side=side)
            for side, quality in (("all_high", high), ("all_low", low))
            for scoring in quality.scorings
        ),
    )


def _apportion(shares: Sequence[float], high_frac: float) -> list[float]:
    """Per window how much of it runs high: the largest shares first, ``high_frac`` on average."""
    left, by_window = high_frac * len(shares), [0.0] * len(shares)
    for window in sorted(range(len(shares)), key=lambda index: -shares[index]):
        by_window[window] = min(1.0, max(0.0, left))
        left -= by_window[window]
    return by_window


def _reference_logp(reference: LLM, window: list[int], tick: Tick) -> Tensor:
    """Log-probabilities of all positions, float32 ``[N, V]``: the one large buffer."""
    logp_NV = torch.empty(len(window), reference.model.config.vocab_size)

    def keep(_: int, position: int, logits_TV: Tensor) -> None:
        torch.log_softmax(logits_TV, dim=-1, out=logp_NV[position : position + logits_TV.shape[0]])
        tick(count=logits_TV.shape[0])

    reference.score([window], sink=keep)
    return logp_NV


class _Collected:
    """Rows of one system and phase as they come in, and what its engine counted meanwhile, call by call."""

    def __init__(self, llm: LLM, phase: Phase) -> None:
        self._llm, self._phase = llm, phase
        self._parts: list[TokenScores] = []
        self._stats: list[EngineStats] = []
        self._executed_R: Ints = np.zeros(len(llm.engine.stats.route_names), np.int64)

    def add(
        self, window: int, position: int, logp_TV: Tensor, logits_TV: Tensor, ids: list[int]
    ) -> None:
        """Compare rows that start at ``position``; ``logp_TV`` may hold more rows than needed."""
        count = logits_TV.shape[0]
        following = [*ids[position + 1 : position + 1 + count], -1][:count]
        self._parts.append(
            TokenScores.of(
                window, position, compare_rows(logp_TV[:count], logits_TV, torch.tensor(following))
            )
        )

    def score_prefill(self, index: int, window: list[int], logp_NV: Tensor, tick: Tick) -> None:
        """Send one window through prefill chunks."""

        def compare(_: int, position: int, logits_TV: Tensor) -> None:
            self.add(index, position, logp_NV[position:], logits_TV, window)
            tick(count=logits_TV.shape[0])

        self._score([window], compare)

    def score_decode(self, windows: list[list[int]], tails_TV: list[Tensor], tick: Tick) -> None:
        """Forced decode of the rows in ``tails_TV``: the reference's, float32 ``[tokens, V]``."""
        prefix = len(windows[0]) - tails_TV[0].shape[0]

        def compare(index: int, position: int, logits_TV: Tensor) -> None:
            first = max(prefix - position, 0)  # the last prefilled token's row is not a decode row
            position, logits_TV = position + first, logits_TV[first:]
            tick(count=logits_TV.shape[0] + (prefix if first else 0))
            if logits_TV.shape[0]:
                tail_TV = tails_TV[index][position - prefix :]
                self.add(index, position, tail_TV, logits_TV, windows[index])

        self._score(windows, compare, prefill_len=prefix)

    def _score(
        self, windows: list[list[int]], sink: ScoreSink, prefill_len: int | None = None
    ) -> None:
        stats = self._llm.engine.stats
        stats.reset()
        self._llm.score(windows, sink=sink, prefill_len=prefill_len)
        self._stats.append(copy.deepcopy(stats))
        self._executed_R += stats.executed_tokens[self._phase]

    def scoring(self) -> Scoring:
        """What was counted so far."""
        return Scoring(phase=self._phase, stats=tuple(self._stats))

    def scores(self) -> TokenScores:
        """All rows so far."""
        return TokenScores.concatenate(self._parts)

    @property
    def high_frac(self) -> float:
        """Share of the work on the executor "high"."""
        return float(self._executed_R @ high_layers(self._llm)) / int(self._executed_R.sum())

    def route_fracs(self) -> dict[str, float]:
        """By route name its share of the executed tokens."""
        fracs_R = self._executed_R / self._executed_R.sum()
        names = self._llm.engine.stats.route_names
        return dict(zip(names, fracs_R.tolist(), strict=True))
