"""What a route is, and the table of those that a router may choose from."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

Attention = Literal["full", "sparse"]
Branch = Literal["target", "draft", "shallow"]
Retention = Literal["protect", "normal", "compress", "drop_first"]


class LayerSpan(NamedTuple):
    """Layers ``start`` (inclusive) to ``stop`` (exclusive) run on the executor called ``executor``."""

    start: int
    stop: int
    executor: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """One row of the RouteTable: everything a token may be given, in one pattern.

    ``spans`` covers all layers in order. ``attention`` is that of all layers; where it is full, those that run low may
    still attend sparsely (``PoolSpec.low_attention``). ``max_wait_steps`` is the queue class: how many steps a decode
    token on this route may wait for company (None: the engine's normal bound). ``retention`` is the class its KV entry
    starts in.
    """

    name: str
    spans: tuple[LayerSpan, ...]
    attention: Attention = "full"
    branch: Branch = "target"
    max_wait_steps: int | None = None
    retention: Retention = "normal"

    def __post_init__(self) -> None:
        edges = [0, *(span.stop for span in self.spans)]
        if not self.spans or any(
            s.start != e or s.stop <= s.start for s, e in zip(self.spans, edges, strict=False)
        ):
            raise ValueError(
                f"route {self.name!r}: spans must cover the layers in order from 0, got {self.spans}"
            )

    @classmethod
    def uniform(
        cls,
        name: str,
        executor: str,
        num_layers: int,
        *,
        max_wait_steps: int | None = None,
        retention: Retention = "normal",
    ) -> "Route":
        """A route that runs every layer on one executor."""
        return cls(
            name=name,
            spans=(LayerSpan(0, num_layers, executor),),
            max_wait_steps=max_wait_steps,
            retention=retention,
        )

    @classmethod
    def with_high_layers(cls, name: str, high: Collection[int], num_layers: int) -> "Route":
        """A route that runs the layers whose numbers are in ``high`` on ``high``, and the others on ``low``."""
        spans = []
        for is_high, run in groupby(range(num_layers), high.__contains__):
            layers = list(run)
            spans.append(LayerSpan(layers[0], layers[-1] + 1, "high" if is_high else "low"))
        return cls(name=name, spans=tuple(spans))

    def executor_at(self, layer: int) -> str:
        """Name of the executor that runs layer number ``layer``, from 0 on."""
        return next(span.executor for span in self.spans if layer < span.stop)

    def is_sparse_at(self, layer: int, sparse_paths: Collection[str]) -> bool:
        """Whether layer number ``layer`` attends sparsely, where executors called ``sparse_paths`` do."""
        return self.attention == "sparse" or self.executor_at(layer) in sparse_paths

    @property
    def executors(self) -> frozenset[str]:
        """Names of the executors that this route needs."""
        return frozenset(span.executor for span in self.spans)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteTable:
    """The routes a router may choose from. ``RoutingDecision.route_T`` holds indices into ``routes``."""

    routes: tuple[Route, ...]

    def __post_init__(self) -> None:
        names = self.names
        if not names or len(set(names)) != len(names):
            raise ValueError(
                f"a RouteTable needs at least one route and distinct names, got {names}"
            )

    def __len__(self) -> int:
        return len(self.routes)

    @property
    def names(self) -> tuple[str, ...]:
        """Route names in index order."""
        return tuple(route.name for route in self.routes)

    def index(self, name: str) -> int:
        """Index of the route called ``name``; raises ValueError with the choices."""
        if name not in self.names:
            raise ValueError(f"no route {name!r}; routes: {', '.join(self.names)}")
        return self.names.index(name)
