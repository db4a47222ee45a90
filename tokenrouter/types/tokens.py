"""A step's tokens, what a router sees of them and answers, and what it hears afterwards.

Shape letters: T tokens in a step, E hidden size, F features.
"""

from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor


class Phase(IntEnum):
    """The phase of a token: part of a prompt chunk, or fed back one at a time."""

    PREFILL = 0
    DECODE = 1


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
        hidden_TE: hidden states after the layers that run before the decision, in the model's dtype; None where the
            decision comes before the forward.
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
    hidden_TE: Tensor | None = None

    def __len__(self) -> int:
        return self.ids_T.shape[0]

    def select(self, index_T: Tensor) -> "TokenBatch":
        """The tokens at ``index_T`` (int64), in that order."""
        columns = {name: getattr(self, name) for name in self.__slots__}
        return replace(self, **{n: x[index_T] for n, x in columns.items() if x is not None})


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
