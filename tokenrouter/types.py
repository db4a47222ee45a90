"""The values that cross folders: what a step's tokens are, what a router sees and answers, what a route is.

Imports torch only. Every other folder may import this module; it imports none of them.

Shape letters: T tokens in a step, F features, K visible KV entries of one request, Q queries of one request.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Attention = Literal["full", "sparse"]
Branch = Literal["target", "draft", "shallow"]
Retention = Literal["protect", "normal", "compress", "drop_first"]


class Phase(IntEnum):
    """The phase of a token: part of a prompt chunk, or fed back one at a time."""

    PREFILL = 0
    DECODE = 1


class LayerSpan(NamedTuple):
    """Layers ``start`` (inclusive) to ``stop`` (exclusive) run on the executor called ``executor``."""

    start: int
    stop: int
    executor: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """One row of the RouteTable: everything a token may be given, in one pattern.

    ``spans`` covers all layers in order. ``max_wait_steps`` is the queue class: how many steps a decode token on this
    route may wait for company (None: the engine's normal bound). ``retention`` is the class its KV entry starts in.
    """

    name: str
    spans: tuple[LayerSpan, ...]
    attention: Attention = "full"
    branch: Branch = "target"
    max_wait_steps: int | None = None
    retention: Retention = "normal"

    def __post_init__(self) -> None:
        edges = [0, *(span.stop for span in self.spans)]
        if not self.spans or any(
            s.start != e or s.stop <= s.start for s, e in zip(self.spans, edges, strict=False)
        ):
            raise ValueError(
                f"route {self.name!r}: spans must cover the layers in order from 0, got {self.spans}"
            )

    @classmethod
    def uniform(
        cls,
        name: str,
        executor: str,
        num_layers: int,
        *,
        max_wait_steps: int | None = None,
        retention: Retention = "normal",
    ) -> "Route":
        """A route that runs every layer on one executor."""
        return cls(
            name=name,
            spans=(LayerSpan(0, num_layers, executor),),
            max_wait_steps=max_wait_steps,
            retention=retention,
        )

    @property
    def executors(self) -> frozenset[str]:
        """Names of the executors that this route needs."""
        return frozenset(span.executor for span in self.spans)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteTable:
    """The routes a router may choose from. ``RoutingDecision.route_T`` holds indices into ``routes``."""

    routes: tuple[Route, ...]

    def __post_init__(self) -> None:
        names = self.names
        if not names or len(set(names)) != len(names):
            raise ValueError(
                f"a RouteTable needs at least one route and distinct names, got {names}"
            )

    def __len__(self) -> int:
        return len(self.routes)

    @property
    def names(self) -> tuple[str, ...]:
        """Route names in index order."""
        return tuple(route.name for route in self.routes)

    def index(self, name: str) -> int:
        """Index of the route called ``name``; raises ValueError with the choices."""
        if name not in self.names:
            raise ValueError(f"no route {name!r}; routes: {', '.join(self.names)}")
        return self.names.index(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch:
    """The tokens of one step in plan order (request by request, positions ascending). All tensors on one device.

    Attributes:
        ids_T: int64 token ids.
        positions_T: int64 position of the token in its request (tokens seen, never tokens kept).
        row_T: int64 row of the request in the slot table.
        phase_T: int64 ``Phase``.
        prompt_len_T: int64 prompt length of the token's request (generated tokens sit at or beyond it).
        repeats_T: int64 how often the same id came earlier in the same request.
        previous_T: int64 id of the token before it in its request, -1 at position 0.
        turn_start_T: int64 position of the request's last special token up to and including this one, 0 where there is
            none; -1 where the vocabulary's special tokens are not known.
        prefix_hash_T: int64 hash of the request's ids up to and including this token (never of the batch).
    """

    ids_T: Tensor
    positions_T: Tensor
    row_T: Tensor
    phase_T: Tensor
    prompt_len_T: Tensor
    repeats_T: Tensor
    previous_T: Tensor
    turn_start_T: Tensor
    prefix_hash_T: Tensor

    def __len__(self) -> int:
        return self.ids_T.shape[0]

    def select(self, index_T: Tensor) -> "TokenBatch":
        """The tokens at ``index_T`` (int64), in that order."""
        return TokenBatch(**{name: getattr(self, name)[index_T] for name in self.__slots__})


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteInput:
    """What a router sees of the tokens it must decide. It never sees weights, KV or later tokens.

    Attributes:
        values_TF: float32 feature matrix; column f is the feature ``names[f]``.
        names: the columns, in the order the router declared them.
        ids_T, positions_T, row_T, phase_T, prefix_hash_T: as in ``TokenBatch``.
    """

    values_TF: Tensor
    names: tuple[str, ...]
    ids_T: Tensor
    positions_T: Tensor
    row_T: Tensor
    phase_T: Tensor
    prefix_hash_T: Tensor

    def __len__(self) -> int:
        return self.ids_T.shape[0]

    def feature(self, name: str) -> Tensor:
        """Column ``name`` as float32 [T]; raises ValueError when the router did not declare it."""
        if name not in self.names:
            raise ValueError(
                f"feature {name!r} was not asked for; this input has: {', '.join(self.names) or 'none'}"
            )
        return self.values_TF[:, self.names.index(name)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingDecision:
    """A router's answer, one entry per token.

    Attributes:
        route_T: int64 index into the router's RouteTable.
        score_T: float32, larger means more in need of the high path; NaN where the router has no score.
        reason_T: int64 index into ``reasons``.
        reasons: short fixed phrases, the router's vocabulary of reasons.
    """

    route_T: Tensor
    score_T: Tensor
    reason_T: Tensor
    reasons: tuple[str, ...]

    @classmethod
    def constant(
        cls, route: int, num_tokens: int, reason: str, device: torch.device | str = "cpu"
    ) -> "RoutingDecision":
        """The same route for every token."""
        return cls(
            route_T=torch.full((num_tokens,), route, dtype=torch.int64, device=device),
            score_T=torch.full((num_tokens,), float("nan"), device=device),
            reason_T=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            reasons=(reason,),
        )

    def among(self, index_N: Tensor, num_tokens: int, reason: str) -> "RoutingDecision":
        """This answer, which is that of the tokens at ``index_N`` (int64), as one for all ``num_tokens``.

        The others take route 0 without a score, for ``reason``.
        """
        whole = RoutingDecision.constant(0, num_tokens, reason, self.route_T.device)
        others_T = whole.reason_T + len(self.reasons)
        return RoutingDecision(
            route_T=whole.route_T.index_copy(0, index_N, self.route_T),
            score_T=whole.score_T.index_copy(0, index_N, self.score_T),
            reason_T=others_T.index_copy(0, index_N, self.reason_T),
            reasons=(*self.reasons, reason),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFeedback:
    """What the engine tells a router after a step (``Router.observe``).

    Attributes:
        num_running, num_waiting: requests in the two states after the step.
        free_slot_frac: share of the KV pool that a request could still get.
        route_tokens: tokens executed per route name in this step.
        step_ms: wall time of the step.
    """

    num_running: int
    num_waiting: int
    free_slot_frac: float
    route_tokens: dict[str, int]
    step_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBatch:
    """The requests of a forward, for attention over one slot table. B requests, R rows of the table, N entries in one.

    Attributes:
        query_rows_T: int64, a permutation of the forward's rows: request by request, positions ascending.
        num_queries_B: int64, at least 1 each; their sum is T.
        query_start_B: int64 position of each request's first query; its queries are consecutive.
        row_B: int64 row of the request in the slot table.
        num_keys_B: int64 visible entries, the queries' own included.
        slots_RN: int64 slot table: the first ``num_keys_B`` entries of a row are visible, oldest first.
        positions_RN: int64 original positions of those entries, ascending; None when they are 0 .. N-1.
    """

    query_rows_T: Tensor
    num_queries_B: Tensor
    query_start_B: Tensor
    row_B: Tensor
    num_keys_B: Tensor
    slots_RN: Tensor
    positions_RN: Tensor | None = None


class Segment(NamedTuple):
    """Rows ``start`` to ``stop`` of a forward run on the executor called ``executor``."""

    start: int
    stop: int
    executor: str


@dataclass(frozen=True, kw_only=True, slots=True)
class KVAccess:
    """How a forward uses the slots of one layer group.

    Attributes:
        slots_T: int64 slot that each token's entry is written to.
        attention: the entries that each request's queries see.
    """

    slots_T: Tensor
    attention: AttentionBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """The input of one decoder forward: tokens sorted by route, so that every executor gets one contiguous slice.

    Attributes:
        ids_T, positions_T: int64, sorted by route.
        segments: for each layer, the segments that cover rows 0 .. T-1 in order. Equal layers share one tuple.
        kv: per layer group, where entries are written and read.
    """

    ids_T: Tensor
    positions_T: Tensor
    segments: tuple[tuple[Segment, ...], ...]
    kv: tuple[KVAccess, ...]

    def __len__(self) -> int:
        return self.ids_T.shape[0]
