"""What the entries of a prompt depend on beside its ids: the key under which requests share them."""

from collections.abc import Callable, Hashable

from tokenrouter.features.base import Dependency
from tokenrouter.routers.base import Router
from tokenrouter.scheduler import Request

UNSHAREABLE: frozenset[Dependency] = frozenset({"history", "load", "random"})
"""A decision that depends on one of these may be another for the same ids."""

ALIKE: frozenset[Dependency] = frozenset({"prompt", "prompt_length"})
"""What must be the same in two prompts for one to share the other's beginning, where a router looks at it."""


def is_shareable(router: Router) -> bool:
    """Whether the same prompt gets the same decisions again."""
    return not router.depends_on & UNSHAREABLE


def prefix_key(router: Router) -> Callable[[Request], Hashable | None]:
    """The key of a request's prompt under ``router`` as it is when asked.

    The router's version, and what its answer for a token looks at beyond the ids up to it. Weights, attention and
    retention are an engine's own, as its cache is. None where the router's decisions cannot be shared.
    """

    def key(request: Request) -> Hashable | None:
        if not is_shareable(router):
            return None
        if router.level == "request":
            assert request.decision is not None, "a request without its router's answer"
            return router.version, request.decision.route
        depends_on = router.depends_on
        length = request.prompt_len if "prompt_length" in depends_on else None
        last = request.prompt_len - 1
        whole = int(request.history.prefix_hash[last]) if "prompt" in depends_on else None
        return router.version, length, whole

    return key
