"""The baseline that decides per request: which router says which tokens are in need, and on what it is calibrated."""

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from tokenrouter.engine import calibration
from tokenrouter.features import TokenTypeTable, sequence_batch
from tokenrouter.routers import (
    HIGH,
    CompositeRouter,
    RequestLevelRouter,
    Router,
    RuleRouter,
)
from tokenrouter.routers.wrapper import WrapperRouter
from tokenrouter.types import Phase
from tokenrouter.workloads import RequestSpec

System = TypeVar("System")


def request_router_for(router: Router, num_layers: int) -> RequestLevelRouter:
    """Decides per request; ``router`` says which tokens are in need, or the rules do where it cannot.

    Args:
        router: the chosen one; one that decides per request is its own baseline.
        num_layers: of the model.
    """
    if isinstance(router, RequestLevelRouter):
        return router
    part = _precision(router)
    names = part.routes(num_layers).names
    decides_prompts = part.level == "token" and Phase.PREFILL in part.phases
    says_who_is_needy = decides_prompts and names[HIGH] == "high" and "low" in names
    return RequestLevelRouter(inner=part if says_who_is_needy else RuleRouter())


def _precision(router: Router) -> Router:
    """What chooses between executors: of a composite router, wrapped or not, the part for it; else ``router``."""
    if isinstance(router, CompositeRouter):
        return router.precision
    if isinstance(router, WrapperRouter) and (part := _precision(router.inner)) is not router.inner:
        return part
    return router


def calibrate_on_requests(
    router: RequestLevelRouter,
    types: TokenTypeTable,
    requests: Sequence[RequestSpec],
    calibration_ids: Sequence[Sequence[int]],
) -> None:
    """Set the threshold on exactly these requests, weighted by prompt and output tokens.

    Args:
        router: gets its threshold, and its inner router gets its own first where it needs one.
        types: of the vocabulary.
        requests: whose shares of needy prompt tokens are compared.
        calibration_ids: passages for the inner router.

    Raises:
        ValueError: ``router`` has no target share, or there is too little to calibrate on.
    """
    calibration.calibrate_on_requests(
        router,
        types,
        [request.prompt_ids for request in requests],
        [len(r.prompt_ids) + (r.params.max_tokens or 0) for r in requests],
        sequences=calibration_ids,
    )


def prompt_shares(
    router: RequestLevelRouter, types: TokenTypeTable, prompts: Sequence[Sequence[int]]
) -> list[float]:
    """Per prompt the share of its tokens that the router's inner token router would send high."""
    see = router.extractor(types).extract
    return [router.prompt_shares(see(sequence_batch(i, token_types=types)))[0] for i in prompts]


class Sides(NamedTuple):
    """Per request whether it goes high, and the share of all tokens that does so."""

    goes_high: list[bool]
    high_frac: float


def choose_high(
    router: RequestLevelRouter,
    shares: Sequence[float],
    weights: Sequence[float],
    high_frac: float,
) -> Sides:
    """Which of these requests a router that decides per request sends high.

    Args:
        router: whose rule it is; not modified.
        shares: per request its share of needy tokens.
        weights: per request its number of tokens.
        high_frac: share of all tokens that is wanted high; met as nearly as whole requests allow.

    Raises:
        ValueError: no request, or a share out of range.
    """
    own = copy.deepcopy(router)
    own.set_target(high_frac)
    own.calibrate_requests(shares, weights)
    threshold = own.threshold
    assert threshold is not None
    goes_high = [share >= threshold for share in shares]
    num_high = sum(weight for weight, is_high in zip(weights, goes_high, strict=True) if is_high)
    return Sides(goes_high, num_high / sum(weights))


def with_computed(
    measured: Mapping[str, System], computed: System, chosen: str
) -> dict[str, System]:
    """Results by system with request_level's, which are computed: baselines first, ``chosen`` last."""
    order = dict.fromkeys(("all_high", "all_low", "request_level", chosen))
    return {name: measured.get(name, computed) for name in order}
