"""LEVEL 1: which route each token takes. Routers see features, never weights or KV.

``conf/router`` is the registry of the command line; ``make_router`` gives the same set by name.
"""

from tokenrouter.routers.all_high import AllHighRouter
from tokenrouter.routers.all_low import AllLowRouter
from tokenrouter.routers.base import HIGH, LOW, Router
from tokenrouter.routers.batched import BatchedRouter
from tokenrouter.routers.budget import Budget, Thresholds
from tokenrouter.routers.cached import CachedRouter
from tokenrouter.routers.composite import CompositeRouter
from tokenrouter.routers.entropy import EntropyRouter
from tokenrouter.routers.interval import IntervalRouter
from tokenrouter.routers.layerwise import LayerwiseRouter
from tokenrouter.routers.learned import LearnedRouter
from tokenrouter.routers.linear import LinearRouter
from tokenrouter.routers.mlp import MLPRouter
from tokenrouter.routers.oracle import OracleRouter
from tokenrouter.routers.random import RandomRouter
from tokenrouter.routers.request_level import RequestLevelRouter
from tokenrouter.routers.rule import RuleRouter
from tokenrouter.routers.rule_score import RuleWeights
from tokenrouter.routers.trees import TreesRouter

__all__ = [
    "HIGH",
    "LOW",
    "AllHighRouter",
    "AllLowRouter",
    "BatchedRouter",
    "Budget",
    "CachedRouter",
    "CompositeRouter",
    "EntropyRouter",
    "IntervalRouter",
    "LayerwiseRouter",
    "LearnedRouter",
    "LinearRouter",
    "MLPRouter",
    "OracleRouter",
    "RandomRouter",
    "RequestLevelRouter",
    "Router",
    "RuleRouter",
    "RuleWeights",
    "Thresholds",
    "TreesRouter",
    "make_router",
]


def make_router(name: str) -> Router:
    """The router called ``name`` with its defaults; ``request_level`` with a target of 10 % high.

    Raises:
        ValueError: no such router; the message lists the choices.
    """
    classes: dict[str, type[Router]] = {
        cls.name: cls
        for cls in (
            AllHighRouter,
            AllLowRouter,
            RandomRouter,
            RuleRouter,
            RequestLevelRouter,
            LayerwiseRouter,
            EntropyRouter,
            BatchedRouter,
            CachedRouter,
            IntervalRouter,
            MLPRouter,
            LinearRouter,
            TreesRouter,
        )
    }
    if name in (CompositeRouter.name, OracleRouter.name):
        raise ValueError(
            f"router {name!r} has no defaults: build it with its parts or its file of labels, and "
            "pass the object"
        )
    if name not in classes:
        raise ValueError(f"no router {name!r}; routers: {', '.join(classes)}")
    if name == RequestLevelRouter.name:
        return RequestLevelRouter(high_frac=0.1)
    return classes[name]()
