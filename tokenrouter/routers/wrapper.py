"""A router around another: what is not changed is the inner one's.

Shape letters: T tokens in a step, P those of them that are meant.
"""

from collections.abc import Collection, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from tokenrouter.features.base import Dependency
from tokenrouter.kernels import KernelSet
from tokenrouter.routers.answers import CacheCounts
from tokenrouter.routers.base import Router
from tokenrouter.routers.rule import RuleRouter
from tokenrouter.types import RouteInput, RouteTable, RoutingDecision, StepFeedback

_COLUMNS = tuple(f.name for f in fields(RouteInput) if f.name != "names")


class WrapperRouter(Router):
    """Decides as the inner router does; its version includes the inner one's options.

    Args:
        inner: None: ``RuleRouter()``.

    Raises:
        ValueError: ``inner`` decides per request, or is an interval router, which goes outermost.
    """

    def __init__(self, inner: Router | None = None) -> None:
        self.inner = RuleRouter() if inner is None else inner
        check_part(self.inner, who=self.name)
        self.features, self.optional = self.inner.features, self.inner.optional
        self.phases = self.inner.phases
        self.sees = self.inner.sees
        self.after_layer = self.inner.after_layer

    @property
    def own_options(self) -> dict[str, object]:
        """The wrapper's options besides the inner router's."""
        return {}

    @property
    def options(self) -> dict[str, object]:
        """The wrapper's own, and the inner router's with its name."""
        return {**self.own_options, "inner": described(self.inner)}

    @property
    def depends_on(self) -> frozenset[Dependency]:
        """As the inner router."""
        return self.inner.depends_on

    @property
    def only_route(self) -> int | None:
        """As the inner router."""
        return self.inner.only_route

    @property
    def needs_calibration(self) -> bool:
        """As the inner router."""
        return self.inner.needs_calibration

    @property
    def cache_counts(self) -> CacheCounts | None:
        """Of a cache within, if there is one."""
        return self.inner.cache_counts

    def routes(self, num_layers: int) -> RouteTable:
        """The inner router's."""
        return self.inner.routes(num_layers)

    def high_work(self, route_T: Tensor) -> Tensor:
        """By the inner router's routes."""
        return self.inner.high_work(route_T)

    def route(self, inputs: RouteInput) -> RoutingDecision:
        """The inner router's answer."""
        return self.inner.route(inputs)

    def use_for(self, *, model: str, model_hash: str, low: str | None) -> None:
        """The inner router hears of it."""
        self.inner.use_for(model=model, model_hash=model_hash, low=low)

    def use_kernels(self, kernels: KernelSet) -> None:
        """The inner router hears of them."""
        self.inner.use_kernels(kernels)

    def calibrate(self, inputs: Sequence[RouteInput]) -> None:
        """Calibrates the inner router."""
        self.inner.calibrate(inputs)

    def forget(self) -> None:
        """The inner router forgets."""
        self.inner.forget()

    def observe(self, feedback: StepFeedback) -> None:
        """The inner router hears of it."""
        self.inner.observe(feedback)


def described(router: Router) -> dict[str, object]:
    """Name and options, for the version of what is built around ``router``."""
    return {"name": router.name, "options": router.options}


def check_part(part: Router, *, who: str) -> None:
    """Raises ValueError where ``part`` cannot be part of the router called ``who``."""
    if part.level != "token":
        raise ValueError(
            f"{who} takes routers that decide per token, and {part.name!r} decides per {part.level}: "
            "choose another inner router, e.g. rule"
        )
    if part.decides_every != 1:
        raise ValueError(
            f"{who} cannot hold {part.name!r}, whose tokens between two decisions are the engine's "
            f"to fill in: put {part.name} outermost, around {who}"
        )


def check_repeatable(inner: Router, *, who: str, unkept: Collection[Dependency]) -> None:
    """Raises ValueError where an answer of ``inner`` depends on one of ``unkept``: it cannot be kept."""
    if found := sorted(inner.depends_on & set(unkept)):
        raise ValueError(
            f"{who} keeps answers, and those of {inner.name!r} depend on {', '.join(found)}, which "
            "is never the same again: choose an inner router that looks at tokens (rule, linear, mlp "
            f"without such features), or use {inner.name} without {who}"
        )


def select(inputs: RouteInput, index_P: Tensor) -> RouteInput:
    """The tokens at ``index_P`` (int64), in that order."""
    return RouteInput(names=inputs.names, **{c: getattr(inputs, c)[index_P] for c in _COLUMNS})


def concat(parts: Sequence[RouteInput]) -> RouteInput:
    """The tokens of ``parts``, which have the same features, one after another; at least one part."""
    if len(parts) == 1:
        return parts[0]
    columns = {c: torch.cat([getattr(part, c) for part in parts]) for c in _COLUMNS}
    return RouteInput(names=parts[0].names, **columns)
