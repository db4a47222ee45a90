"""What all learned routers share: a trained file, a budget, thresholds, and what they refuse to route for.

Shape letters: T tokens in a step, G groups of layers (1: all layers are decided at once), L layers, R = G + 1 routes.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenrouter.checks import check_flag
from tokenrouter.features import of_one_phase
from tokenrouter.routers.artifact import TRAIN, Artifact, Kind, read_artifact, shipped
from tokenrouter.routers.base import Router
from tokenrouter.routers.budget import Budget, Thresholds
from tokenrouter.routers.layer_groups import LayerGroups
from tokenrouter.routers.thresholds import read_thresholds
from tokenrouter.types import Phase, RouteInput, RouteTable, RoutingDecision

SHIPPED, CALIBRATED = "shipped", "calibrated"
TIE_BREAK = 1e-6
"""What a token's score loses per position: among equal ones the earlier goes first, so that a budget is met."""
_REASONS = ("score over the threshold", "score under the threshold")
_GROUP_REASONS = (_REASONS[0], "score over the threshold in some layers", _REASONS[1])


class LearnedRouter(Router):
    """High where the learned score reaches the threshold of its phase.

    A trained file may say which layers belong together and what each group of them needs. A group then goes high where
    the score and the group's offset reach the threshold together, so that there is a route per number of groups that
    run high.

    Features of the logits before a token, which decode tokens alone have, count in decode; prompt tokens are scored
    without them.

    Args:
        path: of a trained router; ``shipped``: the one that comes with the package for the low path in use.
        budget: share of high work in each phase, of what is decided (tokens, with groups tokens x layers); None: 10 %.
        thresholds: ``calibrated``: on text like what is served, so that the budget holds there; ``shipped``: those
            stored with the router, for the shares that it has; else the path of a file that task=calibrate wrote, whose
            share then is the budget.
        layer_groups: decide about the trained file's groups of layers one by one, where it has any; False: all layers
            of a token go one way.

    Raises:
        ValueError: a file that is missing, damaged or of another kind, thresholds of another router, a share without a
            stored threshold, or a flag that is none.
    """

    kind: ClassVar[Kind]

    def __init__(
        self,
        path: str = SHIPPED,
        budget: Budget | None = None,
        thresholds: str = CALIBRATED,
        layer_groups: bool = True,
    ) -> None:
        check_flag("router.layer_groups", layer_groups)
        self._wants_groups = layer_groups
        self.path = str(path)
        self.budget = budget or Budget(high_frac=0.1)
        self.thresholds_from = str(thresholds)
        self._thresholds = Thresholds()
        self._use(read_artifact(self._first_path(), self.kind))

    @property
    def options(self) -> dict[str, object]:
        """The trained router by its content, the budget and the thresholds; where files lie does not matter."""
        return {
            "artifact": self._artifact_version,
            "layer_groups": self.layer_groups is not None,
            "budget": {"high_frac": self.budget.high_frac},
            "thresholds_from": self.thresholds_from,
            "thresholds": {phase.name: value for phase, value in self.thresholds.items()},
        }

    @property
    def layer_groups(self) -> LayerGroups | None:
        """The groups of layers that are decided about one by one; None: all layers of a token go one way."""
        return self.artifact.layer_groups if self._wants_groups else None

    @property
    def thresholds(self) -> dict[Phase, float]:
        """The threshold per phase; empty before calibration."""
        return self._thresholds.values

    @property
    def needs_calibration(self) -> bool:
        """True until there are thresholds."""
        return not self.thresholds

    def use_for(self, *, model: str, model_hash: str, low: str | None) -> None:
        """See Router. The shipped router of the low path takes the place of another shipped one.

        Raises:
            ValueError: trained for another model or low path; or calibrated with another shipped router's scores.
        """
        if self.path == SHIPPED and low is not None and low != self.artifact.trained_for.executor:
            paths = shipped(self.kind)
            if low in paths:
                self._switch(read_artifact(paths[low], self.kind))
        _check_fits(self.artifact, self.name, model=model, model_hash=model_hash, low=low)

    def calibrate(self, inputs: Sequence[RouteInput]) -> None:
        """Sets the threshold of each phase that ``inputs`` hold; a token's score counts in each layer of its group."""
        assert self.budget.high_frac is not None
        self._thresholds.calibrate_on(inputs, self.budget.high_frac, self.layer_scores)

    def set_budget(self, budget: Budget) -> None:
        """Another share of high work; its thresholds are to be calibrated.

        Args:
            budget: with a share.
        """
        self.budget, self.thresholds_from = budget, CALIBRATED
        self._thresholds = Thresholds()

    def routes(self, num_layers: int) -> RouteTable:
        """``high`` and ``low``; with groups of layers see ``LayerGroups.routes``."""
        groups = self.layer_groups
        return super().routes(num_layers) if groups is None else groups.routes(num_layers)

    def high_work(self, route_T: Tensor) -> Tensor:
        """See Router: the share of the layers in those groups that stay high."""
        return self._high_work_R[route_T]

    @abstractmethod
    def score(self, inputs: RouteInput) -> Tensor:
        """The learned need of the high path, float32 ``[T]``; its scale is the router's own."""

    def route(self, inputs: RouteInput) -> RoutingDecision:
        """High where the score reaches the threshold, as many groups of layers as do with their offsets."""
        score_T = self._ranked(inputs)
        need_TG = score_T[:, None] + self._offset_G
        is_low_TG = ~(need_TG >= self._thresholds.limits(inputs.phase_T)[:, None])  # NaN is low
        route_T = is_low_TG.sum(1)  # HIGH is 0, and each group less is one further
        reasons: tuple[str, ...] = _REASONS
        reason_T = route_T
        if self.layer_groups is not None:
            reason_T = (route_T > 0).astype(np.int64) + (route_T == len(self._offset_G))
            reasons = _GROUP_REASONS
        device = inputs.ids_T.device
        return RoutingDecision(
            route_T=torch.from_numpy(route_T).to(device),
            score_T=torch.from_numpy(score_T).to(device),
            reason_T=torch.from_numpy(reason_T).to(device),
            reasons=reasons,
        )

    @abstractmethod
    def load(self, artifact: Artifact) -> None:
        """Gets ready to score with ``artifact``."""

    def _ranked(self, inputs: RouteInput) -> NDArray[np.float32]:
        """The score, float32 ``[T]``, without ties between tokens of a request.

        By numpy, as the route: in a decode step an operator of torch costs three times as much.
        """
        tie_T = inputs.positions_T.cpu().numpy().astype(np.float32) * np.float32(TIE_BREAK)
        ranked_T: NDArray[np.float32] = self.score(inputs).cpu().numpy() - tie_T
        return ranked_T

    def layer_scores(self, inputs: RouteInput) -> Tensor:
        """What is compared with thresholds, per layer that is decided, float32 ``[T, L]``; without groups L is 1."""
        return torch.from_numpy(self._ranked(inputs)[:, None] + self._offset_L)

    def _first_path(self) -> Path | str:
        """The file to begin with: the given one, or the first shipped one until the low path is known."""
        if self.path != SHIPPED:
            return self.path
        paths = shipped(self.kind)
        if not paths:
            raise ValueError(
                f"no trained router of kind {self.kind} is shipped: {TRAIN}, and give router.path"
            )
        return next(iter(paths.values()))

    def _switch(self, artifact: Artifact) -> None:
        if self.thresholds and self.thresholds_from == CALIBRATED:
            raise ValueError(
                f"router {self.name} was calibrated with the scores for {self.artifact.trained_for.executor} and "
                f"is now used for {artifact.trained_for.executor}: make a new router, and calibrate it after use_for"
            )
        assert (artifact.bins.names, artifact.trained_for.after_layer) == (
            self.features,
            self.after_layer,
        ), "shipped routers of a kind share their features and decision point"
        self._use(artifact)

    def _use(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self._artifact_version = artifact.version
        self.features = artifact.bins.names
        self.after_layer = artifact.trained_for.after_layer
        self.optional = of_one_phase(self.features)
        groups = self.layer_groups
        self._offset_G = np.array([0.0] if groups is None else groups.offsets, np.float32)
        self._offset_L = np.array([0.0] if groups is None else groups.layer_offsets, np.float32)
        width_G = torch.tensor([1] if groups is None else groups.widths)
        high_R = torch.cat([torch.zeros(1), width_G.cumsum(0)]).flip(0)
        self._high_work_R = high_R.double() / width_G.sum()
        self.load(artifact)
        if self.thresholds_from == CALIBRATED:
            if self.budget.high_frac is None:
                raise ValueError(
                    f"router {self.name} needs a share to route high: set router.budget.high_frac, 0 to 1, or "
                    "router.thresholds to a file of task=calibrate"
                )
        elif self.thresholds_from == SHIPPED:
            stored = artifact.thresholds if groups is None else artifact.group_thresholds
            self._thresholds.set(_stored(stored, self.budget.high_frac))
        else:
            known = read_thresholds(
                self.thresholds_from, artifact.version, has_groups=groups is not None
            )
            self._thresholds.set(known)


def _stored(
    stored: Mapping[str, Mapping[str, float]], high_frac: float | None
) -> dict[Phase, float]:
    """The thresholds that come with a trained router for a share."""
    shares = {float(share): by_phase for share, by_phase in stored.items()}
    if high_frac not in shares:
        raise ValueError(
            f"no threshold for router.budget.high_frac={high_frac} is stored with the trained router; stored: "
            f"{', '.join(stored) or 'none'}: choose one of these, or router.thresholds=calibrated"
        )
    return {Phase[name.upper()]: value for name, value in shares[high_frac].items()}


def _check_fits(
    artifact: Artifact, name: str, *, model: str, model_hash: str, low: str | None
) -> None:
    known, path = artifact.trained_for, f"router={name} router.path=<its file>"
    if model_hash != known.model_hash:
        raise ValueError(
            f"router {name} was trained for the model {known.model} ({known.model_hash}), and this is {model} "
            f"({model_hash}): {TRAIN} model=... executor=..., and use it by {path}"
        )
    if low is not None and low != known.executor:
        raise ValueError(
            f"router {name} was trained for the low path {known.executor!r}, and this pool has {low!r}: choose an "
            "executor "
            f"whose low path it is, or {TRAIN} executor=..., and use it by {path}"
        )
