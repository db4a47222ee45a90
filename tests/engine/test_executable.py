"""Guards the choice of what runs where the pool lacks an executor: high in all layers, under an honest name."""

from typing import Any

import pytest

from tokenrouter.engine.executable import executable_routes
from tokenrouter.routers import RandomRouter
from tokenrouter.types import LayerSpan, Phase, Route, RouteTable

LAYERS = 4


def uniform(name: str, executor: str) -> Route:
    return Route.uniform(name, executor, LAYERS)


def mixed(name: str, *executors: str) -> Route:
    spans = tuple(LayerSpan(i, i + 1, executor) for i, executor in enumerate(executors))
    return Route(name=name, spans=spans)


def router(*routes: Route, only: int | None = None) -> RandomRouter:
    class Fixed(RandomRouter):
        only_route = only  # type: ignore[assignment]

        def routes(self, num_layers: int) -> RouteTable:
            return RouteTable(routes=routes)

    return Fixed()


HIGH, LOW, INT4 = uniform("best", "high"), uniform("low", "low"), uniform("int4", "int4")
MIXED = mixed("mixed", "high", "low", "low", "low")


@pytest.mark.parametrize(
    ("routes", "executors", "executed", "names"),
    [
        ((HIGH, LOW), {"high", "low"}, [0, 1], ("best", "low")),
        ((LOW, HIGH), {"high"}, [1, 1], ("low", "best")),
        ((LOW, INT4, HIGH), {"high", "low"}, [0, 2, 2], ("low", "int4", "best")),
        ((LOW, INT4), {"high", "low"}, [0, 2], ("low", "int4", "high")),
        ((MIXED,), {"high"}, [1], ("mixed", "high")),
        ((MIXED, INT4), {"high", "low"}, [0, 2], ("mixed", "int4", "high")),
        ((mixed("high", *["low"] * 4),), {"high"}, [1], ("high", "high_in_all_layers")),
    ],
)
def test_a_lost_route_runs_high_in_all_layers(
    routes: tuple[Route, ...], executors: set[str], executed: list[int], names: tuple[str, ...]
) -> None:
    """The first route that the pool can run, which may be the lowest; a name that two routes share."""
    found = executable_routes(router(*routes), LAYERS, executors)
    assert found.executed_of.tolist() == executed
    assert found.table.names == names
    for asked, runs in zip(routes, executed, strict=True):
        assert found.table.routes[runs] == asked or found.table.routes[runs].executors == {"high"}
    assert len(found.executors) == len(names)
    assert set(found.executors) <= executors


@pytest.mark.parametrize(
    ("asked", "built"),
    [
        ({"branch": "draft"}, "target"),
        ({"branch": "shallow"}, "target"),
    ],
)
def test_what_is_not_built_yet_is_refused_by_name(asked: dict[str, Any], built: str) -> None:
    """Routes with a draft model ran as target."""
    [(name, value)] = asked.items()
    route = Route(name="thrifty", spans=LOW.spans, **asked)
    message = f"'thrifty' of router 'random' asks for {name}='{value}', .*only {name}='{built}'"
    with pytest.raises(ValueError, match=message):
        executable_routes(router(HIGH, route), LAYERS, {"high", "low"})


@pytest.mark.parametrize(
    ("only", "phases", "executors", "used"),
    [
        (None, set(Phase), {"high", "low"}, {"high", "low"}),
        (None, set(Phase), {"high"}, {"high"}),
        (1, set(Phase), {"high", "low"}, {"low"}),
        (1, {Phase.DECODE}, {"high", "low"}, {"high", "low"}),
        (0, {Phase.DECODE}, {"high", "low"}, {"high"}),
    ],
)
def test_executors_in_use(
    only: int | None, phases: set[Phase], executors: set[str], used: set[str]
) -> None:
    """Costs that are not measured though both are needed: phases that the router leaves out take route 0."""
    asked = router(HIGH, LOW, only=only)
    asked.phases = frozenset(phases)  # type: ignore[misc]
    assert executable_routes(asked, LAYERS, executors).used == used
