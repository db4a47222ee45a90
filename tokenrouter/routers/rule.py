"""Hand-written rules on positions, token types and repeats: works with nothing to train.

Shape letters: T tokens in a step, Y token types.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from tokenrouter.features import TokenType
from tokenrouter.routers.base import Router
from tokenrouter.routers.budget import Budget, Thresholds
from tokenrouter.routers.rule_score import MAX_POSITIONS, RuleScore, RuleWeights
from tokenrouter.types import Phase, RouteInput, RoutingDecision

_NO_RULE, _REPEATS_LOW, _FIRST, _END, _REPEATS_HIGH, _TYPE = range(6)
_REASONS = (
    "no rule applies",
    "repeats, goes low",
    "first positions",
    "prompt end",
    "repeats, goes high",
    *(f"type {token_type.label}" for token_type in TokenType),
)
_BUDGET_REASONS = ("under the budget's threshold", *_REASONS[1:])


class RuleRouter(Router):
    """High by rule, or by score against a budget.

    Without a budget the first rule that applies decides: first positions (high), prompt end (high),
    repeats (``repeats_go``), type in ``high_types`` (high); what is left goes low.

    With ``budget.high_frac`` a token is high when its score (``RuleScore``) reaches the calibrated
    threshold of its phase; the reason then names what stands out about it.

    Args:
        first_positions: so many positions from the request's start; 0 switches the rule off.
        prompt_end: so many tokens at the prompt's end; 0 switches the rule off.
        high_types: labels of ``TokenType``.
        repeats: a token repeats when its id came at least so often earlier in its request; 0
            switches the rule off.
        repeats_go: where repeating tokens go, ``high`` or ``low``.
        weights: of the score; None: the defaults.
        budget: None, or ``high_frac`` None: the rules decide.

    Raises:
        ValueError: an unknown token type, or a count out of range.
    """

    name = "rule"
    sees = frozenset({"positions", "prefix_hash"})

    def __init__(
        self,
        first_positions: int = 16,
        prompt_end: int = 1,
        high_types: Sequence[str] = ("special", "newline"),
        repeats: int = 0,
        repeats_go: Literal["high", "low"] = "low",
        weights: RuleWeights | None = None,
        budget: Budget | None = None,
    ) -> None:
        counts = {"first_positions": first_positions, "prompt_end": prompt_end, "repeats": repeats}
        for option, count in counts.items():
            if not 0 <= count < MAX_POSITIONS:
                raise ValueError(f"{option}={count} is outside 0 (off) to {MAX_POSITIONS - 1}")
        if repeats_go not in ("high", "low"):
            raise ValueError(f"repeats_go={repeats_go!r} is neither 'high' nor 'low'")
        self.first_positions = first_positions
        self.prompt_end = prompt_end
        self.high_types = tuple(high_types)
        self.repeats = repeats
        self.repeats_go = repeats_go
        self.weights = weights or RuleWeights()
        self.budget = budget or Budget()
        self._score = RuleScore(self.weights, first_positions, self.budget.seed)
        self._thresholds = Thresholds()
        high = {TokenType.parse(label) for label in self.high_types}
        self._reason_Y = torch.tensor([_TYPE + t if t in high else _NO_RULE for t in TokenType])
        self.features = self._needed_features()

    @property
    def options(self) -> dict[str, object]:
        """All options and the calibrated thresholds."""
        return {
            "first_positions": self.first_positions,
            "prompt_end": self.prompt_end,
            "high_types": self.high_types,
            "repeats": self.repeats,
            "repeats_go": self.repeats_go,
            "weights": self.weights.options,
            "budget": {"high_frac": self.budget.high_frac, "seed": self.budget.seed},
            "thresholds": {phase.name: value for phase, value in self.thresholds.items()},
        }

    @property
    def thresholds(self) -> dict[Phase, float]:
        """The calibrated threshold per phase; empty before calibration or without a budget."""
        return self._thresholds.values

    @property
    def needs_calibration(self) -> bool:
        """True with a budget until ``calibrate`` was called."""
        return self.budget.high_frac is not None and not self.thresholds

    def calibrate(self, inputs: Sequence[RouteInput]) -> None:
        """Sets the threshold of each phase that ``inputs`` hold; nothing without a budget."""
        if self.budget.high_frac is None:
            return
        self._thresholds.calibrate_on(inputs, self.budget.high_frac, self.score)

    def score(self, inputs: RouteInput) -> Tensor:
        """The weighted sum, float32 [T]; larger means more in need of the high path."""
        type_T = inputs.feature("token_type").long()
        return self._score(inputs, type_T, self._at_prompt_end(inputs), self._is_repeat(inputs))

    def route(self, inputs: RouteInput) -> RoutingDecision:
        """Decides by the rules, or by score when there is a budget."""
        type_T = inputs.feature("token_type").long()
        end_T, repeat_T = self._at_prompt_end(inputs), self._is_repeat(inputs)
        score_T = self._score(inputs, type_T, end_T, repeat_T)
        has_budget = self.budget.high_frac is not None
        reason_T = type_T + _TYPE if has_budget else self._reason_Y.to(type_T.device)[type_T]
        if repeat_T is not None and not has_budget:
            goes = _REPEATS_HIGH if self.repeats_go == "high" else _REPEATS_LOW
            reason_T = reason_T.masked_fill(repeat_T, goes)
        if end_T is not None:
            reason_T = reason_T.masked_fill(end_T, _END)
        if self.first_positions:
            reason_T = reason_T.masked_fill(inputs.positions_T < self.first_positions, _FIRST)
        if has_budget:
            is_high_T = self._thresholds.is_over(score_T, inputs.phase_T)
            reason_T = reason_T * is_high_T
        else:
            is_high_T = reason_T >= _FIRST
        return RoutingDecision(
            route_T=(~is_high_T).long(),  # HIGH is 0, LOW is 1
            score_T=score_T,
            reason_T=reason_T,
            reasons=_BUDGET_REASONS if has_budget else _REASONS,
        )

    def _needed_features(self) -> tuple[str, ...]:
        """The features that these options look at."""
        needed = {
            "token_type": True,
            "distance_to_prompt_end": self.prompt_end > 0,
            "repeats": self.repeats > 0,
            "line_start": self.weights.line_start != 0,
        }
        return tuple(name for name, is_needed in needed.items() if is_needed)

    def _at_prompt_end(self, inputs: RouteInput) -> Tensor | None:
        if not self.prompt_end:
            return None
        distance_T = inputs.feature("distance_to_prompt_end")
        return (distance_T >= 0) & (distance_T < self.prompt_end)

    def _is_repeat(self, inputs: RouteInput) -> Tensor | None:
        return inputs.feature("repeats") >= self.repeats if self.repeats else None
