"""LEVEL 1: the contract of a router.

A router says which route each token takes. It sees features, ids, positions, rows, phases and
prefix hashes (``RouteInput``). It never sees weights, hidden states, KV entries, an executor or a
later token.

Shape letters: T tokens in a step.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal, final, get_args

from torch import Tensor

from tokenrouter.features import (
    FeatureExtractor,
    Signals,
    TokenTypeTable,
    check_features,
    feature_specs,
)
from tokenrouter.features.base import DECISION_POINTS, DecisionPoint, Dependency
from tokenrouter.kernels import KernelSet
from tokenrouter.routers.answers import CacheCounts
from tokenrouter.types import (
    LayerSpan,
    Phase,
    Route,
    RouteInput,
    RouteTable,
    RoutingDecision,
    StepFeedback,
)

Level = Literal["token", "request"]
Seen = Literal["ids", "positions", "prefix_hash"]
"""What a router may read of ``RouteInput`` besides the features that it declared."""
HIGH, LOW = 0, 1
"""Indices into the default RouteTable."""
MANY_LAYERS = 1024
"""Deeper than any model: also a fixed layer map names all of its routes for so many."""


class Router(ABC):
    """Decides a route per token; its answer for a token is a function of that token's own request.

    What must hold (``tests/contracts/test_routers.py`` checks it for every config of the group):

    - deterministic: the same input gives the same decision, in this process or another;
    - causal: nothing from later tokens. How long the prompt is may be used, and is declared;
    - independent of the company: the same answer in any batch, chunk and order of the tokens;
    - no tokens in, no tokens out; routes index the table of ``routes()``, reasons ``reasons``;
    - ``version`` changes whenever the answer could: with the options and with calibration.

    A router of level ``request`` is the exception to the second and third: it is asked once per
    request with the whole prompt, and its answer for the first token holds for every token of the
    request, generated ones too.

    A router must not modify its input, and may keep state from ``observe`` only where
    ``depends_on`` says ``load`` or ``history``. Its constructor names every option, so that a
    misspelt one is refused.

    Attributes:
        name: what the router is called in configs, tables and logs.
        level: ``token`` or ``request``.
        after_layer: layers of every token that run before it is asked, the same in all of its routes;
            0: it is asked before the forward.
        phases: the phases whose tokens it decides. It is not asked about the others, which take
            route 0.
        features: the features it needs, the columns of ``RouteInput.values_TF`` in this order.
        optional: those of its features that a token of one of its phases may lack, where they are NaN; a feature
            that is not among them is refused where it does not exist.
        sees: what it reads besides them. One that declares less than all is remembered by less:
            see ``CachedRouter``.
        decides_every: an engine asks about positions of a request that are multiples of it; the
            tokens between repeat the recorded decision of the last multiple.
        look_ahead: in prefill an engine also hands it (``prepare``) the tokens of a prompt up to
            the next multiple of it, before the chunks that run them; 0: never.
    """

    name: ClassVar[str]
    level: ClassVar[Level] = "token"
    after_layer: int = 0
    phases: frozenset[Phase] = frozenset(Phase)
    features: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()
    sees: frozenset[Seen] = frozenset(get_args(Seen))
    decides_every: int = 1
    look_ahead: int = 0

    @property
    @abstractmethod
    def options(self) -> dict[str, object]:
        """Everything besides the tokens that the answer depends on, thresholds too; JSON-able."""

    @abstractmethod
    def route(self, inputs: RouteInput) -> RoutingDecision:
        """Decides every token of ``inputs``.

        Args:
            inputs: T tokens, possibly none, of several requests; ``inputs.names == self.features``.

        Returns:
            One route, score and reason per token, on the input's device.

        Raises:
            ValueError: a feature is missing, or the router has a budget and was not calibrated.
        """

    @final
    def extractor(
        self, token_types: TokenTypeTable, signals: Signals | None = None
    ) -> FeatureExtractor:
        """What makes the input of ``route`` from a step's tokens, with the features that this router declares.

        Args:
            token_types: the vocabulary's types, on the device of the batches.
            signals: of the engine that runs the tokens; None: features that need them are refused.
        """
        return FeatureExtractor(self.features, token_types, signals, self.optional)

    @property
    def version(self) -> str:
        """Name and a short hash of ``options``: part of the key of whatever stores decisions."""
        text = json.dumps([self.name, self.options], sort_keys=True)
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    @property
    def depends_on(self) -> frozenset[Dependency]:
        """What the answer is computed from; by default the union over ``features``."""
        specs = feature_specs(self.features)
        return frozenset[Dependency]().union(*(spec.depends_on for spec in specs))

    @property
    def decision_point(self) -> DecisionPoint:
        """When it is asked; see ``DecisionPoint``."""
        return "after_layer_k" if self.after_layer else "pre_forward"

    def high_work(self, route_T: Tensor) -> Tensor:
        """Per token the share of what is decided about it that goes high, float64 ``[T]``.

        By default all on route 0 and nothing on others, as where routes are ``high`` and ``low``.

        Args:
            route_T: int64, answers of a router whose first route is ``high``.
        """
        return (route_T == HIGH).double()

    def routes(self, num_layers: int) -> RouteTable:
        """The routes to choose from; by default ``high`` and ``low``, on the executors so named.

        Layers that run before it is asked are high in both.
        """
        high, low = (Route.uniform(name, name, num_layers) for name in ("high", "low"))
        if first := min(self.after_layer, num_layers - 1):
            spans = LayerSpan(0, first, "high"), LayerSpan(first, num_layers, "low")
            low = replace(low, spans=spans)
        return RouteTable(routes=(high, low))

    @property
    def only_route(self) -> int | None:
        """The index that every answer is, whatever the tokens; None where answers may differ.

        An engine then spares itself what only a choice needs, such as measured costs.
        """
        return None

    @final
    def check(self) -> None:
        """Refuses what this router declares and cannot be had, by name and with the choices.

        Raises:
            ValueError: a decision point that no engine has, or that leaves no time for what it looks ahead to or
                for a whole request; a feature that does not exist, or not in the router's phases (for level
                ``request``: in prefill) or at its decision point.
        """
        if self.after_layer < 0:
            raise ValueError(f"router {self.name}: after_layer={self.after_layer} is below 0")
        if self.after_layer and (self.look_ahead or self.level == "request"):
            asked = (
                "about tokens ahead of their chunk" if self.look_ahead else "when a request comes"
            )
            raise ValueError(
                f"router {self.name} is asked {asked}, and what it decides by is known only after layer "
                f"{self.after_layer} of the token's own forward: leave {self.name} out, or decide before the forward"
            )
        if self.decision_point not in DECISION_POINTS:
            raise ValueError(
                f"router {self.name} has the decision point {self.decision_point!r}; "
                f"decision points: {', '.join(DECISION_POINTS)}"
            )
        phases = frozenset({Phase.PREFILL}) if self.level == "request" else self.phases
        needed = [name for name in self.features if name not in self.optional]
        check_features(needed, phases=phases, decision_point=self.decision_point, who=self.name)

    def use_for(self, *, model: str, model_hash: str, low: str | None) -> None:
        """Hears which model and low path it will route for, before it is calibrated; by default any will do.

        Args:
            model: its name, for messages.
            model_hash: of its weights.
            low: name of the low path's executor; None: the pool has none.

        Raises:
            ValueError: it was trained for others.
        """

    def use_kernels(self, kernels: KernelSet) -> None:
        """Hears which backend's operators to decide with, such as an engine's; by default it has none to run.

        The answers are the same by every backend.
        """

    @property
    def needs_calibration(self) -> bool:
        """Whether ``route`` would raise until ``calibrate`` was called."""
        return False

    def calibrate(self, inputs: Sequence[RouteInput]) -> None:
        """Sets thresholds so that a budget holds on tokens like these; nothing without a budget.

        Args:
            inputs: typical tokens of the phases that will be decided, as ``route`` sees them; a
                router of level ``request`` takes whole requests, told apart by ``row_T`` within one
                input.

        Raises:
            ValueError: too few tokens for the budget.
        """

    def prepare(self, inputs: RouteInput) -> None:
        """Hears of prompt tokens that it will be asked about later; by default it waits for that.

        Args:
            inputs: as ``route`` will see them.
        """

    @property
    def cache_counts(self) -> CacheCounts | None:
        """How often a kept answer served; None where none is kept across requests."""
        return None

    def forget(self) -> None:
        """Lets go of kept answers; those to come are the same, and computed again."""

    def observe(self, feedback: StepFeedback) -> None:
        """Hears what a step did; by default it does not matter."""
