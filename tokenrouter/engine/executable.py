"""The routes as an engine runs them: a router's table, and what becomes of routes that the pool cannot run."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from tokenrouter.engine.step import IntArray
from tokenrouter.routers import Router
from tokenrouter.types import Phase, Route, RouteTable


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutableRoutes:
    """What a router may ask for, and what runs.

    Attributes:
        table: the router's routes in its order; behind them ``high``, where the pool lacks an executor of some route
            and no route of the router's own runs high in all layers.
        executed_of: int64, per route of the router the index in ``table`` of the one that runs: itself, or one that
            runs high in all layers.
        executors: per route of ``table`` the executor of most of its layers; of a route that never runs, that of the
            one that runs in its place.
        used: the executors that the router's answers can lead to, as in ``executors``.
    """

    table: RouteTable
    executed_of: IntArray
    executors: tuple[str, ...]
    used: frozenset[str]


def executable_routes(
    router: Router, num_layers: int, executors: Collection[str], *, has_sparse: bool = False
) -> ExecutableRoutes:
    """Matches the router's routes with the executors of a pool.

    Args:
        router: asked for its routes and for ``only_route``.
        num_layers: of the model.
        executors: names of the pool's executors.
        has_sparse: whether the pool says what sparse attention sees.

    Raises:
        ValueError: a route asks for a branch that no engine has yet.
    """
    asked = router.routes(num_layers).routes
    for route in asked:
        _refuse_unbuilt(route, router.name)
    possible = [
        route.executors <= set(executors) and (has_sparse or route.attention == "full")
        for route in asked
    ]
    routes = asked if all(possible) else _with_high(asked, num_layers)
    fallback = next((i for i, route in enumerate(routes) if _is_high(route)), -1)
    executed = [i if ok else fallback for i, ok in enumerate(possible)]
    executed += range(len(asked), len(routes))
    main = tuple(_main_executor(routes[i]) for i in executed)
    return ExecutableRoutes(
        table=RouteTable(routes=routes),
        executed_of=np.array(executed[: len(asked)], np.int64),
        executors=main,
        used=frozenset(main[i] for i in _answers(router, len(asked))),
    )


def check_after_layer(router: Router, table: RouteTable, num_layers: int) -> None:
    """Refuses a router that is asked after layers which the model does not have, or which differ by its answer.

    Args:
        router: asked after its ``after_layer`` first layers.
        table: its routes as they run.
        num_layers: of the model.

    Raises:
        ValueError: with what to change.
    """
    first = router.after_layer
    if first >= num_layers:
        raise ValueError(
            f"router {router.name} decides after layer {first}, and the model has {num_layers}: there must be a layer "
            f"left to route, so at most {num_layers - 1}"
        )
    paths = {
        route.name: tuple((route.executor_at(i), route.attention) for i in range(first))
        for route in table.routes
    }
    if len(set(paths.values())) > 1:
        raise ValueError(
            f"router {router.name} decides after layer {first}, and its routes {', '.join(paths)} differ before it: "
            "give them the same executors and attention there"
        )


def _refuse_unbuilt(route: Route, router: str) -> None:
    if route.branch != "target":
        raise ValueError(
            f"route {route.name!r} of router {router!r} asks for branch={route.branch!r}, which is not built yet: only "
            "branch='target' runs; change the route"
        )


def _with_high(routes: tuple[Route, ...], num_layers: int) -> tuple[Route, ...]:
    """The routes, and one that runs high in all layers if there is none yet, under a name that is free."""
    if any(_is_high(route) for route in routes):
        return routes
    taken = {route.name for route in routes}
    name = "high" if "high" not in taken else "high_in_all_layers"
    return (*routes, Route.uniform(name, "high", num_layers))


def _is_high(route: Route) -> bool:
    """Whether a token on it is computed as one of all_high is: what a lost route may be replaced with."""
    return route.executors == {"high"} and route.attention == "full"


def _main_executor(route: Route) -> str:
    """The executor that runs most of a route's layers; of two that run as many, not ``high``."""
    layers: dict[str, int] = {}
    for span in route.spans:
        layers[span.executor] = layers.get(span.executor, 0) + span.stop - span.start
    return max(layers, key=lambda name: (layers[name], name != "high"))


def _answers(router: Router, num_routes: int) -> set[int]:
    """The routes that the router's tokens can ask for; those of phases that it does not decide ask for route 0."""
    if router.only_route is None:
        return set(range(num_routes))
    return {router.only_route} if router.phases == set(Phase) else {router.only_route, 0}
