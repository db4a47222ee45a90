"""The rule router's score: a weighted sum of what its rules look at.

Shape letters: T tokens in a step, P positions (the last stands for all later ones), Y token types.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenrouter.features import TokenType
from tokenrouter.features.draws import DRAW_LEVELS, draw_levels
from tokenrouter.types import RouteInput

MAX_POSITIONS = 4096
_TIE_BREAK = 1e-3


def _default_types() -> dict[str, float]:
    return {
        "special": 2.0,
        "newline": 0.7,
        "number": 0.8,
        "punctuation": 0.7,
        "function_word": 1.0,
        "code": 0.6,
        "entity": 0.3,
        "plain": 0.0,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleWeights:
    """What each sign of a needy token adds to its score.

    Attributes:
        first_positions: within the router's ``first_positions``.
        position: times ``position_scale / (position_scale + position)``: early tokens count more.
        position_scale: the position at which that term has halved, over 0.
        prompt_end: within the prompt's last ``prompt_end`` tokens.
        line_start: a capitalised word without a space before it.
        repeats: the id came at least the router's ``repeats`` times before (if that rule is on).
        types: weight per ``TokenType`` label; types that are left out weigh 0.
    """

    first_positions: float = 1.0
    position: float = 2.0
    position_scale: float = 64.0
    prompt_end: float = 1.0
    line_start: float = 0.0
    repeats: float = 0.0
    types: Mapping[str, float] = field(default_factory=_default_types)

    def __post_init__(self) -> None:
        if self.position_scale <= 0:
            raise ValueError(f"weights.position_scale={self.position_scale} must be over 0")
        for label in self.types:
            TokenType.parse(label)

    @property
    def options(self) -> dict[str, object]:
        """Plain values, for the router's version."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        return plain | {"types": dict(self.types)}


class RuleScore:
    """Computes the score: two table look-ups, then one term per sign that weighs something.

    Args:
        weights: the weights.
        first_positions: how many positions get the weight of that name.
        seed: of the tie break.
    """

    def __init__(self, weights: RuleWeights, first_positions: int, seed: int) -> None:
        self._weights = weights
        self._seed = seed
        position_P = torch.arange(MAX_POSITIONS, dtype=torch.float32)
        decay_P = weights.position_scale / (weights.position_scale + position_P)
        is_first_P = position_P < first_positions
        self._position_P = weights.position * decay_P + weights.first_positions * is_first_P
        self._type_Y = torch.tensor([float(weights.types.get(t.label, 0.0)) for t in TokenType])

    def __call__(
        self, inputs: RouteInput, type_T: Tensor, end_T: Tensor | None, repeat_T: Tensor | None
    ) -> Tensor:
        """The score, float32 [T].

        Args:
            inputs: the tokens.
            type_T: int64 token types.
            end_T: bool, at the prompt's end; None where that rule is switched off.
            repeat_T: bool, repeats; None where that rule is switched off.
        """
        weights, device = self._weights, type_T.device
        score_T = draw_levels(inputs.prefix_hash_T, self._seed) * (_TIE_BREAK / DRAW_LEVELS)
        score_T += self._position_P.to(device)[inputs.positions_T.clamp_max(MAX_POSITIONS - 1)]
        score_T += self._type_Y.to(device)[type_T]
        if end_T is not None and weights.prompt_end:
            score_T += end_T * weights.prompt_end
        if repeat_T is not None and weights.repeats:
            score_T += repeat_T * weights.repeats
        if weights.line_start:
            score_T += inputs.feature("line_start") * weights.line_start
        return score_T
