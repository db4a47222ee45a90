"""One router per dimension, joined into one route: precision from one, retention from another.

Shape letters: T tokens in a step, P those of them that a part decides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from tokenrouter.features.base import Dependency
from tokenrouter.kernels import KernelSet
from tokenrouter.routers.all_high import AllHighRouter
from tokenrouter.routers.answers import CacheCounts
from tokenrouter.routers.base import MANY_LAYERS, Router
from tokenrouter.routers.wrapper import check_part, described, select
from tokenrouter.types import (
    Phase,
    Retention,
    RouteInput,
    RouteTable,
    RoutingDecision,
    StepFeedback,
)

_UNASKED = "phase that it does not decide"


class CompositeRouter(Router):
    """Each token's route is a pair: where it computes, and the class that its KV entry starts in.

    The table is the product, precision first: ``high+protect``, ``high+normal``, ``low+protect``, ...
    A part keeps its own features, phases and budget; outside its phases it gives its route 0. The score
    is that of precision, or of retention where precision is not chosen.

    Args:
        precision: its routes say on which executors a token runs; None: all high.
        retention: its routes say the retention class, by ``classes``; None: all of class normal. What
            they say of executors is ignored.
        classes: route of ``retention`` to class (protect, normal, compress, drop_first); one that is not
            named has the class of its own table. None: high is protected.

    Raises:
        ValueError: neither part is given; a part decides per request, or is an interval router, which
            goes outermost; the parts are asked after different layers; an unknown route or class.
    """

    name = "composite"

    def __init__(
        self,
        precision: Router | None = None,
        retention: Router | None = None,
        classes: Mapping[str, Retention] | None = None,
    ) -> None:
        if precision is None and retention is None:
            raise ValueError("composite has no part: give precision, retention or both")
        self.precision = AllHighRouter() if precision is None else precision
        self.retention = AllHighRouter() if retention is None else retention
        self.classes: dict[str, Retention] = {} if retention is None else {"high": "protect"}
        if classes is not None:
            self.classes = dict(classes)
        self._parts = (self.precision, self.retention)
        self._scored = self.precision if precision is not None else self.retention
        for part in self._parts:
            check_part(part, who=self.name)
        self.after_layer = max(part.after_layer for part in self._parts)
        if any(part.after_layer not in (0, self.after_layer) for part in self._parts):
            points = " and ".join(f"{part.name}: after {part.after_layer}" for part in self._parts)
            raise ValueError(f"composite's parts must be asked after the same layer, got {points}")
        self._class_of_route = self._retention_classes()
        self._names = tuple(dict.fromkeys(self._class_of_route))
        self.features = tuple(dict.fromkeys(f for part in self._parts for f in part.features))
        self.optional = self.precision.optional | self.retention.optional
        self.phases = self.precision.phases | self.retention.phases
        self.sees = self.precision.sees | self.retention.sees
        self.look_ahead = max(part.look_ahead for part in self._parts)

    @property
    def options(self) -> dict[str, object]:
        """The classes, and the parts' names and options."""
        parts = {"precision": self.precision, "retention": self.retention}
        return {
            "classes": self.classes,
            "scored": self._scored.name,
            **{name: described(part) for name, part in parts.items()},
        }

    @property
    def depends_on(self) -> frozenset[Dependency]:
        """What either part depends on."""
        return self.precision.depends_on | self.retention.depends_on

    @property
    def only_route(self) -> int | None:
        """Where both parts have one, also for the phases that they do not decide."""
        only = [_only_route(part) for part in self._parts]
        if only[0] is None or only[1] is None:
            return None
        return self._pair(torch.tensor([only[0]]), torch.tensor([only[1]])).item()  # type: ignore[return-value]

    @property
    def needs_calibration(self) -> bool:
        """Whether a part does."""
        return any(part.needs_calibration for part in self._parts)

    @property
    def cache_counts(self) -> CacheCounts | None:
        """Of precision's cache, or else of retention's."""
        return self.precision.cache_counts or self.retention.cache_counts

    def routes(self, num_layers: int) -> RouteTable:
        """Precision's routes in each retention class that occurs."""
        precision = self.precision.routes(num_layers).routes
        if self._scored is not self.precision:
            precision = precision[:1]
        return RouteTable(
            routes=tuple(
                replace(route, name=f"{route.name}+{kind}", retention=kind)
                for route in precision
                for kind in self._names
            )
        )

    def route(self, inputs: RouteInput) -> RoutingDecision:
        """Asks each part about the tokens of its phases."""
        precision, retention = (_ask(part, inputs) for part in self._parts)
        reasons = tuple(f"{p}; {r}" for p in precision.reasons for r in retention.reasons)
        scored = precision if self._scored is self.precision else retention
        return RoutingDecision(
            route_T=self._pair(precision.route_T, retention.route_T),
            score_T=scored.score_T,
            reason_T=precision.reason_T * len(retention.reasons) + retention.reason_T,
            reasons=reasons,
        )

    def use_for(self, *, model: str, model_hash: str, low: str | None) -> None:
        """Each part hears of it."""
        for part in self._parts:
            part.use_for(model=model, model_hash=model_hash, low=low)

    def use_kernels(self, kernels: KernelSet) -> None:
        """Each part hears of them."""
        for part in self._parts:
            part.use_kernels(kernels)

    def calibrate(self, inputs: Sequence[RouteInput]) -> None:
        """Each part that needs it, on the tokens of its phases."""
        for part in self._parts:
            if part.needs_calibration:
                part.calibrate([view(part, tokens)[0] for tokens in inputs])

    def prepare(self, inputs: RouteInput) -> None:
        """Each part hears of the tokens of its phases."""
        for part in self._parts:
            if part.look_ahead:
                part.prepare(view(part, inputs)[0])

    def forget(self) -> None:
        """Both parts forget."""
        for part in self._parts:
            part.forget()

    def observe(self, feedback: StepFeedback) -> None:
        """Both parts hear of it."""
        for part in self._parts:
            part.observe(feedback)

    def _pair(self, precision_T: Tensor, retention_T: Tensor) -> Tensor:
        class_R = torch.tensor([self._names.index(kind) for kind in self._class_of_route])
        return precision_T * len(self._names) + class_R.to(retention_T.device)[retention_T]

    def _retention_classes(self) -> list[Retention]:
        """Per route of the retention part its class."""
        routes = self.retention.routes(MANY_LAYERS).routes
        names = [route.name for route in routes]
        if unknown := [name for name in self.classes if name not in names]:
            raise ValueError(
                f"classes names {', '.join(unknown)}, and {self.retention.name!r} has the routes "
                f"{', '.join(names)}"
            )
        known = get_args(Retention)
        for name, kind in self.classes.items():
            if kind not in known:
                raise ValueError(
                    f"classes.{name}={kind!r} is no retention class; choose one of: {', '.join(known)}"
                )
        return [self.classes.get(route.name, route.retention) for route in routes]


def view(part: Router, inputs: RouteInput) -> tuple[RouteInput, Tensor]:
    """The tokens of ``inputs`` that ``part`` decides, with its own features; and where they stand (int64 [P])."""
    is_its_T = torch.isin(
        inputs.phase_T, torch.tensor(sorted(part.phases), device=inputs.phase_T.device)
    )
    index_P = is_its_T.nonzero().flatten()
    its = inputs if len(index_P) == len(inputs) else select(inputs, index_P)
    if its.names != part.features:
        columns = [its.names.index(name) for name in part.features]
        its = replace(its, names=part.features, values_TF=its.values_TF[:, columns])
    return its, index_P


def _ask(part: Router, inputs: RouteInput) -> RoutingDecision:
    """The part's answer, one entry per token of ``inputs``."""
    its, index_P = view(part, inputs)
    answer = part.route(its)
    decides_all = part.phases == set(Phase)
    return answer if decides_all else answer.among(index_P, len(inputs), _UNASKED)


def _only_route(part: Router) -> int | None:
    """The only route, those of phases that it does not decide among them."""
    return part.only_route if part.phases == set(Phase) or part.only_route == 0 else None
