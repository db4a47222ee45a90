"""A budget turns scores into decisions: a threshold per phase that lets a given share pass.

Shape letters: T tokens in a step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenrouter.types import Phase, RouteInput

_HUGE = torch.finfo(torch.float32).max


def check_frac(name: str, value: float) -> float:
    """``value`` as a float when it is within 0 to 1; raises ValueError otherwise."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}={value} is outside 0 to 1")
    return float(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How many tokens may go high.

    Attributes:
        high_frac: share of high tokens in each phase, 0 to 1; None: no budget.
        seed: of the tie break among equal scores.
    """

    high_frac: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.high_frac is not None:
            check_frac("budget.high_frac", self.high_frac)


class Thresholds:
    """One threshold per phase; a token is high when its score reaches the threshold of its phase.

    Kept apart from the scores: another budget is another threshold, not another score.
    """

    def __init__(self) -> None:
        self._values: dict[Phase, float] = {}
        self._limit_P = np.full(len(Phase), np.nan, np.float32)

    @property
    def values(self) -> dict[Phase, float]:
        """The calibrated thresholds; empty before calibration."""
        return dict(self._values)

    def calibrate(self, high_frac: float, scores_by_phase: Mapping[Phase, Tensor]) -> None:
        """Sets the threshold of each given phase so that ``high_frac`` of its scores reach it.

        Args:
            high_frac: 0 (none) to 1 (all).
            scores_by_phase: float32 [T] scores of typical tokens, or [T, L] of their layers; a phase that is not given
                keeps what it has.

        Raises:
            ValueError: ``high_frac`` is out of range, or a phase has too few scores for it.
        """
        check_frac("high_frac", high_frac)
        for phase, score_T in scores_by_phase.items():
            self._values[phase] = _quantile_threshold(high_frac, score_T, phase)
            self._limit_P[phase] = self._values[phase]

    def set(self, values: Mapping[Phase, float]) -> None:
        """Takes thresholds that were calibrated elsewhere, in place of those that it has."""
        self._values = dict(values)
        for phase in Phase:
            self._limit_P[phase] = self._values.get(phase, np.nan)

    def calibrate_on(
        self,
        inputs: Sequence[RouteInput],
        high_frac: float,
        score: Callable[[RouteInput], Tensor],
    ) -> None:
        """Sets the threshold of each phase that ``inputs`` hold, by the ``score`` of their tokens, as ``calibrate``.

        Raises:
            ValueError: no tokens, or as ``calibrate``.
        """
        if not any(len(part) for part in inputs):
            raise ValueError("cannot calibrate on no tokens: give typical tokens of both phases")
        score_T = torch.cat([score(part) for part in inputs])
        phase_T = torch.cat([part.phase_T for part in inputs])
        phases = [Phase(value) for value in phase_T.unique().tolist()]
        self.calibrate(high_frac, {phase: score_T[phase_T == phase] for phase in phases})

    def is_over(self, score_T: Tensor, phase_T: Tensor) -> Tensor:
        """Whether scores reach their phase's threshold, bool [T].

        Args:
            score_T: float32.
            phase_T: int64.

        Raises:
            ValueError: the phase of a token was never calibrated.
        """
        is_over_T = score_T.cpu().numpy() >= self.limits(phase_T)
        return torch.from_numpy(is_over_T).to(score_T.device)

    def limits(self, phase_T: Tensor) -> NDArray[np.float32]:
        """The threshold of each token's phase, float32 [T]; arguments and errors as ``is_over``."""
        if len(self._values) < len(Phase):
            self._refuse_uncalibrated(phase_T)
        limit_T: NDArray[np.float32] = self._limit_P[phase_T.cpu().numpy()]
        return limit_T

    def _refuse_uncalibrated(self, phase_T: Tensor) -> None:
        seen = {Phase(value) for value in phase_T.unique().tolist()}
        if missing := seen - self._values.keys():
            names = " and ".join(phase.name.lower() for phase in sorted(missing))
            raise ValueError(
                f"a budget is set but there is no threshold for {names} tokens: call "
                "router.calibrate(inputs) with typical tokens first, or leave budget.high_frac null"
            )


def _quantile_threshold(high_frac: float, score_T: Tensor, phase: Phase) -> float:
    """A value between the ``high_frac`` largest scores and the others."""
    if high_frac in (0.0, 1.0):
        return _HUGE if high_frac == 0.0 else -_HUGE
    num_high = round(high_frac * score_T.numel())
    if not 1 <= num_high < score_T.numel():
        raise ValueError(
            f"{len(score_T)} {phase.name.lower()} tokens are too few to calibrate a budget of "
            f"{high_frac}: give at least {round(1 / min(high_frac, 1 - high_frac)) + 1}"
        )
    ordered_T = score_T.flatten().double().sort(descending=True).values
    return float(ordered_T[num_high - 1] + ordered_T[num_high]) / 2
