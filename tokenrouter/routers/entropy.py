"""High where the model was unsure: by the logits that a token was drawn from.

Shape letters: T tokens in a step.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from tokenrouter.routers.base import Router
from tokenrouter.routers.budget import Budget, Thresholds
from tokenrouter.types import Phase, RouteInput, RoutingDecision

Measure = Literal["entropy", "margin", "top1", "surprise"]
_REASONS = ("sure", "unsure")


class EntropyRouter(Router):
    """A decode token is high when the logits before it were at least so uncertain.

    Prompt tokens have no such logits: the router does not decide them, and they take route 0, high.

    Args:
        threshold: in the unit of ``measure``; a token whose score reaches it is high.
        measure: what counts as uncertain: ``entropy`` or ``surprise`` in nats, or one minus
            ``margin`` or ``top1``, probabilities.
        budget: its ``high_frac`` replaces the threshold by one that is calibrated on text.

    Raises:
        ValueError: an unknown measure, or a threshold that is negative or not a number.
    """

    name = "entropy"
    phases = frozenset({Phase.DECODE})

    def __init__(
        self, threshold: float = 2.0, measure: Measure = "entropy", budget: Budget | None = None
    ) -> None:
        if measure not in get_args(Measure):
            raise ValueError(f"measure={measure!r}; measures: {', '.join(get_args(Measure))}")
        if not threshold >= 0:
            raise ValueError(f"threshold={threshold} must be a number, 0 (all high) or more")
        self.threshold = float(threshold)
        self.measure: Measure = measure
        self.budget = budget or Budget()
        self.features = (measure,)
        self._thresholds = Thresholds()

    @property
    def options(self) -> dict[str, object]:
        """All options and the calibrated threshold."""
        return {
            "threshold": self.threshold,
            "measure": self.measure,
            "budget": {"high_frac": self.budget.high_frac},
            "thresholds": {phase.name: value for phase, value in self._thresholds.values.items()},
        }

    @property
    def needs_calibration(self) -> bool:
        """True with a budget until ``calibrate`` was called."""
        return self.budget.high_frac is not None and not self._thresholds.values

    def calibrate(self, inputs: Sequence[RouteInput]) -> None:
        """Sets the threshold that lets the budget's share pass; nothing without a budget."""
        if self.budget.high_frac is None:
            return
        scores = [self.score(part) for part in inputs]
        score_T = torch.cat(scores) if scores else torch.empty(0)
        self._thresholds.calibrate(self.budget.high_frac, {Phase.DECODE: score_T})

    def score(self, inputs: RouteInput) -> Tensor:
        """How unsure, float32 [T], 0 or more."""
        value_T = inputs.feature(self.measure)
        return 1 - value_T if self.measure in ("margin", "top1") else value_T

    def route(self, inputs: RouteInput) -> RoutingDecision:
        """High where the score reaches the threshold."""
        score_T = self.score(inputs)
        if self.budget.high_frac is None:
            is_high_T = score_T >= self.threshold
        else:
            is_high_T = self._thresholds.is_over(score_T, inputs.phase_T)
        return RoutingDecision(
            route_T=(~is_high_T).long(),  # HIGH is 0, LOW is 1
            score_T=score_T,
            reason_T=is_high_T.long(),
            reasons=_REASONS,
        )
