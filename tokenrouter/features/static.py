"""Static features: known before the forward, from ids, positions and the vocabulary alone.

Shape letters: T tokens in a step, V vocabulary.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from tokenrouter.features.base import DecisionPoint, FeatureSpec
from tokenrouter.features.token_types import TokenType, TokenTypeTable
from tokenrouter.types import Phase, TokenBatch


def position(batch: TokenBatch, types: TokenTypeTable) -> Tensor:
    """Position in the request, from 0."""
    return batch.positions_T.float()


def distance_to_prompt_end(batch: TokenBatch, types: TokenTypeTable) -> Tensor:
    """0 at the prompt's last token, positive before it, negative for generated tokens."""
    return (batch.prompt_len_T - 1 - batch.positions_T).float()


def is_decode(batch: TokenBatch, types: TokenTypeTable) -> Tensor:
    """The token's Phase: 0 in a prompt chunk, 1 when fed one at a time."""
    return batch.phase_T.float()


def token_type(batch: TokenBatch, types: TokenTypeTable) -> Tensor:
    """The TokenType of the id."""
    return types.types_V[batch.ids_T].float()


def line_start(batch: TokenBatch, types: TokenTypeTable) -> Tensor:
    """1 for a capitalised word without a space before it, as after a newline or a quote."""
    return types.line_start_V[batch.ids_T].float()


def repeats(batch: TokenBatch, types: TokenTypeTable) -> Tensor:
    """How often the same id came earlier in the request."""
    return batch.repeats_T.float()


_SPECS = (
    FeatureSpec(
        name="position",
        low=0,
        high=math.inf,
        depends_on=frozenset({"tokens"}),
        compute=position,
    ),
    FeatureSpec(
        name="distance_to_prompt_end",
        low=-math.inf,
        high=math.inf,
        depends_on=frozenset({"tokens", "prompt_length"}),
        compute=distance_to_prompt_end,
    ),
    FeatureSpec(
        name="is_decode",
        low=0,
        high=1,
        depends_on=frozenset({"phase"}),
        compute=is_decode,
    ),
    FeatureSpec(
        name="token_type",
        low=0,
        high=max(TokenType),
        depends_on=frozenset({"tokens"}),
        compute=token_type,
    ),
    FeatureSpec(
        name="line_start",
        low=0,
        high=1,
        depends_on=frozenset({"tokens"}),
        compute=line_start,
    ),
    FeatureSpec(
        name="repeats",
        low=0,
        high=math.inf,
        depends_on=frozenset({"tokens"}),
        compute=repeats,
    ),
)
FEATURES: Mapping[str, FeatureSpec] = MappingProxyType({spec.name: spec for spec in _SPECS})
"""Every feature that exists, by name."""


def feature_specs(names: Sequence[str]) -> tuple[FeatureSpec, ...]:
    """The specs of ``names`` in that order.

    Raises:
        ValueError: a name that does not exist (the message lists those that do), or one name twice.
    """
    unknown = [name for name in names if name not in FEATURES]
    if unknown:
        raise ValueError(f"no feature {', '.join(unknown)}; features: {', '.join(FEATURES)}")
    if len(set(names)) != len(names):
        raise ValueError(f"a feature was asked for twice: {', '.join(names)}")
    return tuple(FEATURES[name] for name in names)


def check_features(
    names: Sequence[str], *, phases: Collection[Phase], decision_point: DecisionPoint, who: str
) -> None:
    """Refuses features that do not exist where they are asked for.

    Args:
        names: the features.
        phases: the phases of the tokens that they are asked for.
        decision_point: when they are asked for.
        who: the router that asks, for the message.

    Raises:
        ValueError: one of them does not exist there, or not at all; the message lists the choices.
    """

    def exists(spec: FeatureSpec) -> bool:
        return spec.phases.issuperset(phases) and decision_point in spec.decision_points

    if missing := [spec.name for spec in feature_specs(names) if not exists(spec)]:
        where = " and ".join(phase.name.lower() for phase in sorted(phases))
        choices = [name for name, spec in FEATURES.items() if exists(spec)]
        raise ValueError(
            f"router {who} asks for {', '.join(missing)}, which does not exist in {where} at "
            f"{decision_point}; features there: {', '.join(choices)}"
        )
