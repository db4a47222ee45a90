"""One path for a whole request: what token granularity is worth, and the mode to roll back to.

Shape letters: T tokens, P those of them that belong to prompts, B requests.
"""

import copy
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tokenrouter.features.base import Dependency
from tokenrouter.kernels import KernelSet
from tokenrouter.routers.base import HIGH, MANY_LAYERS, Router
from tokenrouter.routers.budget import check_frac
from tokenrouter.routers.rule import RuleRouter
from tokenrouter.routers.wrapper import described, select
from tokenrouter.types import Phase, RouteInput, RoutingDecision

_REASONS = ("many needy tokens in the prompt", "few needy tokens in the prompt")


class RequestLevelRouter(Router):
    """A request is high when enough of its prompt is needy, as a token router sees it.

    The threshold on that share is calibrated on requests, so that the share of tokens in high
    requests is nearest to ``high_frac``: the token router's budget, spent on whole requests.

    Args:
        inner: the token router that says which tokens are needy; None: ``RuleRouter()``. One that
            needs calibration is copied: it gets thresholds for prompts alone here, with which it
            could not serve as a token router.
        high_frac: share of all tokens that should be high; None: to be given by ``set_target``.

    Raises:
        ValueError: ``inner`` does not decide per token, not in prompts, or its route 0 is not
            ``high``; ``high_frac`` is outside 0 to 1.
    """

    name = "request_level"
    level = "request"

    def __init__(self, inner: Router | None = None, high_frac: float | None = None) -> None:
        inner = RuleRouter() if inner is None else inner
        _check_inner(inner)
        self.inner = copy.deepcopy(inner) if inner.needs_calibration else inner
        self.high_frac = None if high_frac is None else check_frac("high_frac", high_frac)
        self.threshold: float | None = None
        self.features, self.optional = self.inner.features, self.inner.optional

    @property
    def options(self) -> dict[str, object]:
        """Target, threshold and the inner router's options."""
        inner = described(self.inner)
        return {"high_frac": self.high_frac, "threshold": self.threshold, "inner": inner}

    @property
    def depends_on(self) -> frozenset[Dependency]:
        """The whole prompt, besides what the inner router needs."""
        return self.inner.depends_on | {"prompt"}

    @property
    def needs_calibration(self) -> bool:
        """True until there is a threshold for the current target, and the inner router has its own."""
        return self.threshold is None or self.inner.needs_calibration

    def set_target(self, high_frac: float) -> None:
        """Sets the share of tokens that should be high; the router must then be calibrated."""
        self.high_frac = check_frac("high_frac", high_frac)
        self.threshold = None

    def use_for(self, *, model: str, model_hash: str, low: str | None) -> None:
        """The inner router hears of it."""
        self.inner.use_for(model=model, model_hash=model_hash, low=low)

    def use_kernels(self, kernels: KernelSet) -> None:
        """The inner router hears of them."""
        self.inner.use_kernels(kernels)

    def calibrate(self, inputs: Sequence[RouteInput]) -> None:
        """Calibrates on whole requests: shares of their prompts, weighted by their tokens.

        Tokens of phase decode count as the request's output: they weigh, but the threshold does not
        look at them. An inner router that is not calibrated yet is, on the same tokens.
        """
        self._target()
        if self.inner.needs_calibration:
            self.inner.calibrate(inputs)
        shares: list[float] = []
        weights: list[int] = []
        for part in inputs:
            share_B, index_T = self._shares(part)
            shares += share_B.tolist()
            weights += torch.bincount(index_T, minlength=len(share_B)).tolist()
        self.calibrate_requests(shares, weights)

    def calibrate_requests(self, shares: Sequence[float], weights: Sequence[float]) -> None:
        """Sets the threshold so that the weighted share of high requests is nearest to the target.

        Requests of equal share go the same way, so a heavy one may make the target be missed.

        Args:
            shares: per request its prompt's share of needy tokens, see ``prompt_shares``.
            weights: per request its number of tokens, prompt and output.

        Raises:
            ValueError: no target, no requests, unequal lengths, or weights that sum to nothing.
        """
        target = self._target()
        total = sum(weights)
        if len(shares) != len(weights) or total <= 0 or min(weights) < 0:
            raise ValueError(
                f"cannot calibrate on {len(shares)} shares and {len(weights)} weights that sum to "
                f"{total}: give one of each per request, weights not negative"
            )
        weight_of: dict[float, float] = {}
        for share, weight in zip(shares, weights, strict=True):
            weight_of[share] = weight_of.get(share, 0.0) + weight
        descending = sorted(weight_of, reverse=True)
        edges = [*((above + below) / 2 for above, below in pairwise(descending)), 0.0]
        high, best_miss = 0.0, target
        self.threshold = descending[0] + 1.0  # none high
        for share, edge in zip(descending, edges, strict=True):
            high += weight_of[share]
            miss = abs(high / total - target)
            if miss < best_miss:
                self.threshold, best_miss = edge, miss

    def prompt_shares(self, inputs: RouteInput) -> dict[int, float]:
        """Per row of ``inputs`` the share of its prompt's work that the inner router sends high."""
        share_B, _ = self._shares(inputs)
        return dict(zip(inputs.row_T.unique().tolist(), share_B.tolist(), strict=True))

    def route(self, inputs: RouteInput) -> RoutingDecision:
        """Every token gets its row's route; ``inputs`` must hold whole prompts."""
        if self.threshold is None:
            self._target()
            raise ValueError(
                f"{self.name} has no threshold: call router.calibrate(inputs) with whole requests"
            )
        share_B, index_T = self._shares(inputs)
        route_T = (share_B < self.threshold).long()[index_T]  # HIGH is 0, LOW is 1
        score_T = share_B.float()[index_T]
        return RoutingDecision(route_T=route_T, score_T=score_T, reason_T=route_T, reasons=_REASONS)

    def _target(self) -> float:
        if self.high_frac is None:
            raise ValueError(
                f"{self.name} has no high_frac: set it (0 to 1) or call router.set_target"
            )
        return self.high_frac

    def _shares(self, inputs: RouteInput) -> tuple[Tensor, Tensor]:
        """Shares of the distinct rows (float64 [B], rows ascending); per token its index there.

        The inner router is asked about prompt tokens alone.
        """
        row_B, index_T = inputs.row_T.unique(return_inverse=True)
        in_prompt_P = (inputs.phase_T == Phase.PREFILL).nonzero().flatten()
        prompts = inputs if len(in_prompt_P) == len(inputs) else select(inputs, in_prompt_P)
        need_P = self.inner.high_work(self.inner.route(prompts).route_T)
        of_prompt_P = index_T[in_prompt_P]
        needy_B = torch.bincount(of_prompt_P, need_P, minlength=len(row_B))
        prompt_B = torch.bincount(of_prompt_P, minlength=len(row_B))
        return needy_B / prompt_B.clamp_min(1), index_T


def _check_inner(inner: Router) -> None:
    if inner.level != "token":
        raise ValueError(f"inner router {inner.name!r} does not decide per token")
    if Phase.PREFILL not in inner.phases:
        raise ValueError(f"inner router {inner.name!r} does not decide prompt tokens")
    names = inner.routes(MANY_LAYERS).names
    if names[HIGH] != "high":
        raise ValueError(
            f"inner router {inner.name!r} has the routes {', '.join(names)}; the first must be "
            "'high', the route of needy tokens: take a router that chooses between high and low"
        )
