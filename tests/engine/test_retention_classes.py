"""Guards retention by class: which route a token took decides how long its entry lives."""

import numpy as np
import pytest

from tests.engine.retention_cases import options
from tests.engine.tools import prompts, tiny, twin
from tests.engine.watched import Watched
from tokenrouter import LLM
from tokenrouter.kvcache.retention import RouteClass
from tokenrouter.routers import RandomRouter
from tokenrouter.scheduler.request import NEVER
from tokenrouter.types import Route, RouteTable


def assert_only_low_tokens_go(watched: Watched) -> None:
    """Serves requests: many entries are evicted, and none of a token on route 0."""
    watched.serve({str(i): (p, prompts(seed=5)[i][:30]) for i, p in enumerate(prompts()[:8])})
    num_evicted = 0
    for name, request in watched.requests.items():
        gone = np.array(watched.evicted_at(name))[: request.num_tokens] != NEVER
        assert not (gone & (request.requested_N[: request.num_tokens] == 0)).any()
        num_evicted += int(gone.sum())
    assert num_evicted > 50


def test_protected_routes_stay_and_dropped_ones_go() -> None:
    """Classes by the wrong index: the router's own tokens are the first to go."""
    router = RandomRouter(0.3)
    policy = RouteClass(evicted_frac=0.6, classes={"high": "protect", "low": "drop_first"})
    watched = Watched(LLM(tiny(), router=router, executors=twin(), options=options(policy)))
    assert_only_low_tokens_go(watched)


class Classed(RandomRouter):
    """Names the retention classes of its routes itself."""

    def routes(self, num_layers: int) -> RouteTable:
        return RouteTable(
            routes=(
                Route.uniform("high", "high", num_layers, retention="protect"),
                Route.uniform("low", "low", num_layers, retention="drop_first"),
            )
        )


def test_a_router_names_the_classes_of_its_own_routes(caplog: pytest.LogCaptureFixture) -> None:
    """A table with retention classes refused, or read as if all were normal; silence where nothing retires."""
    evicting = options(RouteClass(evicted_frac=0.6, classes={}))
    watched = Watched(LLM(tiny(), router=Classed(0.3), executors=twin(), options=evicting))
    assert "retention classes" not in caplog.text
    assert_only_low_tokens_go(watched)
    LLM(tiny(), router=Classed(0.3), executors=twin())
    assert "classes drop_first, protect of router random have no effect without" in caplog.text


def test_a_class_for_a_route_that_is_not_there_is_refused() -> None:
    """A misspelt route beside a known one: its tokens keep another class than was asked for, without a word."""
    misspelt = RouteClass(classes={"high": "normal", "low": "drop_first", "medium": "protect"})
    with pytest.raises(
        ValueError, match=r"high, low, medium, and .* has high, low: leave medium out"
    ):
        LLM(tiny(), router=RandomRouter(0.3), executors=twin(), options=options(misspelt))
    LLM(tiny(), router="all_high", options=options(RouteClass()))
