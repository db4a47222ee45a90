"""Quality of a routed run: KL(reference || run), full vocabulary, teacher-forced, both phases.

Forced prefill sends a window through prefill chunks. Forced decode prefills a window up to its last
tokens and feeds those one by one through the serving path, several windows in one batch. The
reference's distributions of one window are computed once and compared with every system before the
next window, so that memory stays at one window's logits.

Shape letters: T rows given at once, N tokens of a window, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tokenrouter import LLM
from tokenrouter.evaluation.divergence import TokenScores, compare_rows, mix
from tokenrouter.evaluation.progress import Tick, progress
from tokenrouter.evaluation.shares import high_work


@dataclass(frozen=True, kw_only=True, slots=True)
class QualitySettings:
    """How much is compared.

    Attributes:
        window_tokens: length of a window.
        num_windows: windows of forced prefill.
        decode_tokens: last tokens of a window that forced decode feeds one by one; 0 leaves that
            phase out.
        decode_windows: how many of the windows are decoded, in one batch.

    Raises:
        ValueError: a value outside its range.
    """

    window_tokens: int
    num_windows: int
    decode_tokens: int
    decode_windows: int

    def __post_init__(self) -> None:
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
class Quality:
    """One system's scores.

    Attributes:
        prefill: every token of every window, forced prefill.
        decode: the last tokens of some windows, forced decode; None where it was left out.
        high_frac: share of the work (tokens times layers) on the executor "high" in forced prefill.
    """

    prefill: TokenScores
    decode: TokenScores | None
    high_frac: float


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
        settings: how much is compared.

    Raises:
        ValueError: no windows, or a window that an engine refuses.
    """
    collected = {name: _Collected() for name in systems}
    own, tails_TV = _Collected(), []
    decode_ids = list(windows[: settings.decode_windows]) if settings.decodes else []
    total = sum(map(len, windows)) * (1 + len(systems))
    total += sum(map(len, decode_ids)) * len(systems)
    with progress("quality", total, unit="tokens") as advance:
        for index, window in enumerate(windows):
            logp_NV = _reference_logp(reference, window, partial(advance, "reference"))
            own.add(index, 0, logp_NV, logp_NV, window)
            for name, llm in systems.items():
                tick = partial(advance, f"{name}, window {index + 1}")
                collected[name].score_prefill(llm, index, window, logp_NV, tick)
            if index < len(decode_ids):
                tails_TV.append(logp_NV[-settings.decode_tokens :].clone())
        high_frac = {
            name: record.high_tokens / max(record.tokens, 1) for name, record in collected.items()
        }
        prefill = {name: record.scores() for name, record in collected.items()}
        decode: dict[str, TokenScores | None] = dict.fromkeys(systems)
        for name, llm in systems.items() if decode_ids else ():
            tick = partial(advance, f"{name}, decode")
            decode[name] = _score_decode(llm, decode_ids, tails_TV, tick)
    qualities = {
        n: Quality(prefill=prefill[n], decode=decode[n], high_frac=high_frac[n]) for n in systems
    }
    return QualityReport(reference=own.scores(), systems=qualities)


def request_level_quality(
    high: Quality, low: Quality, shares: Sequence[float], high_frac: float
) -> Quality:
    """What a router reaches that sends whole windows high, up to ``high_frac`` of all tokens.

    A window is one request, so such a router's scores are all_high's on some windows and all_low's
    on the others. A run of its own would compute the same numbers again, and with a few windows it
    could not meet the share. Here the window on the threshold counts as both, in proportion, so that
    the share of high tokens is met exactly.

    Args:
        high: scores of all_high.
        low: scores of all_low.
        shares: per window its share of tokens in need of the high path; the largest go first.
        high_frac: share of tokens that run high, 0 to 1.
    """
    left, by_window = high_frac * len(shares), [0.0] * len(shares)
    for window in sorted(range(len(shares)), key=lambda index: -shares[index]):
        by_window[window] = min(1.0, max(0.0, left))
        left -= by_window[window]
    decode = mix(high.decode, low.decode, by_window) if high.decode and low.decode else None
    return Quality(
        prefill=mix(high.prefill, low.prefill, by_window), decode=decode, high_frac=high_frac
    )


def _reference_logp(reference: LLM, window: list[int], tick: Tick) -> Tensor:
    """Log-probabilities of all positions, float32 ``[N, V]``: the one large buffer."""
    logp_NV = torch.empty(len(window), reference.model.config.vocab_size)

    def keep(_: int, position: int, logits_TV: Tensor) -> None:
        torch.log_softmax(logits_TV, dim=-1, out=logp_NV[position : position + logits_TV.shape[0]])
        tick(count=logits_TV.shape[0])

    reference.score([window], sink=keep)
    return logp_NV


def _score_decode(
    llm: LLM, windows: list[list[int]], tails_TV: list[Tensor], tick: Tick
) -> TokenScores:
    """Forced decode of the rows in ``tails_TV``: the reference's, float32 ``[decode tokens, V]``."""
    collected = _Collected()
    prefix = len(windows[0]) - tails_TV[0].shape[0]

    def compare(index: int, position: int, logits_TV: Tensor) -> None:
        first = max(prefix - position, 0)  # the last prefilled token's row is not a decode row
        position, logits_TV = position + first, logits_TV[first:]
        tick(count=logits_TV.shape[0] + (prefix if first else 0))
        if logits_TV.shape[0]:
            collected.add(
                index, position, tails_TV[index][position - prefix :], logits_TV, windows[index]
            )

    llm.score(windows, sink=compare, prefill_len=prefix)
    return collected.scores()


class _Collected:
    """Rows of one system and phase as they come in."""

    def __init__(self) -> None:
        self._parts: list[TokenScores] = []
        self.tokens = 0
        self.high_tokens = 0.0

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

    def score_prefill(
        self, llm: LLM, index: int, window: list[int], logp_NV: Tensor, tick: Tick
    ) -> None:
        """Send one window through prefill chunks."""

        def compare(_: int, position: int, logits_TV: Tensor) -> None:
            self.add(index, position, logp_NV[position:], logits_TV, window)
            tick(count=logits_TV.shape[0])

        llm.engine.stats.reset()
        llm.score([window], sink=compare)
        high, total = high_work(llm)
        self.high_tokens += high
        self.tokens += total

    def scores(self) -> TokenScores:
        """All rows so far."""
        return TokenScores.concatenate(self._parts)
