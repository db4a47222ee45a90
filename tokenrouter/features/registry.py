"""Every feature by name, and the checks that what is asked for exists.

Shape letters: T tokens, F features, P phases.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from tokenrouter.features import dynamic, hidden, static
from tokenrouter.features.base import DecisionPoint, FeatureSpec
from tokenrouter.types import Phase

FEATURES: Mapping[str, FeatureSpec] = MappingProxyType(
    {spec.name: spec for spec in (*static.SPECS, *dynamic.SPECS, *hidden.SPECS)}
)
"""Every feature that exists, by name; docs/features.md lists them."""


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


def needs_signals(names: Sequence[str]) -> bool:
    """Whether one of the features ``names`` is known only while an engine runs the tokens.

    Raises:
        ValueError: as ``feature_specs``.
    """
    return any(spec.needs_signals for spec in feature_specs(names))


def of_one_phase(names: Sequence[str]) -> frozenset[str]:
    """Those of ``names`` that do not exist in both phases.

    Raises:
        ValueError: as ``feature_specs``.
    """
    return frozenset(s.name for s in feature_specs(names) if s.phases < frozenset(Phase))


def where_they_exist(names: Sequence[str], phase_T: Tensor) -> Tensor:
    """Which of the features exist for tokens of these phases, bool ``[T, F]``.

    Args:
        names: the features.
        phase_T: int64.

    Raises:
        ValueError: as ``feature_specs``.
    """
    specs = feature_specs(names)
    exists_PF = torch.tensor([[phase in spec.phases for spec in specs] for phase in Phase])
    return exists_PF[phase_T]


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
