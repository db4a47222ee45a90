"""By the retention class of the route that the router gave the token."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from torch import Tensor

from tokenrouter.kvcache.retention.base import Entries, ScoredPolicy
from tokenrouter.types import Retention

CLASSES: tuple[Retention, ...] = get_args(Retention)
"""From what stays longest to what goes first; ``Entries.class_N`` indexes it."""


@dataclass(kw_only=True)
class RouteClass(ScoredPolicy):
    """The classes in their order, within a class the newest: ``drop_first`` goes before anything else.

    Entries of the class ``protect`` are guarded by every policy.

    Attributes:
        classes: route name to class, instead of the class that the router's own table gives the route.

    Raises:
        ValueError: an unknown class, or no mapping; as ScoredPolicy.
    """

    name = "route"
    unused = frozenset({"groups"})  # it decides alike in all
    needs = frozenset({"classes"})

    classes: Mapping[str, Retention] = field(
        default_factory=lambda: {"high": "normal", "low": "drop_first"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.classes, Mapping):
            raise ValueError(
                f"classes={self.classes!r} must map route names to retention classes, such as {{'low': 'drop_first'}}"
            )
        for route, name in self.classes.items():
            if name not in CLASSES:
                raise ValueError(
                    f"classes.{route}={name!r} is no retention class; choose one of: {', '.join(CLASSES)}"
                )

    def score(self, entries: Entries) -> Tensor:
        """See ScoredPolicy."""
        recency_N = entries.positions_N / max(entries.num_seen, 1)
        return recency_N - entries.class_N
