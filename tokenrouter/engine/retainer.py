"""Applies a retention policy: watches attention, asks the policy at a request's own positions, frees slots at once.

N entries of one request in one layer group, G layer groups.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenrouter.engine.step import IntArray, PackedStep
from tokenrouter.features.draws import DRAW_LEVELS, draw_levels
from tokenrouter.kernels.attention.reference import gather
from tokenrouter.kvcache import KVArena, KVPool
from tokenrouter.kvcache.retention import (
    CLASSES,
    Entries,
    EntryStatistics,
    RetentionOptions,
    RouteClass,
)
from tokenrouter.models import Observation
from tokenrouter.scheduler import UNDECIDED, Request
from tokenrouter.scheduler.request import NEVER
from tokenrouter.types import RouteTable

_PROTECT, _COMPRESS = CLASSES.index("protect"), CLASSES.index("compress")


class Retired(NamedTuple):
    """What one step brought: times that the policy was asked (per request and group), and entries that it evicted."""

    num_decisions: int
    evicted_entries: int


class _Part(NamedTuple):
    """A forward of the chunks ``of``: up to which of their tokens it ran, and what it reports.

    Attributes:
        requests: of the whole step.
        start_B, stop_B: first token, and the one behind the last.
        num_observed_B: so many of the last queries report.
        num_entries_GB: per layer group how many entries each request's last query saw, where the forward reports.
    """

    requests: Sequence[Request]
    of: IntArray
    start_B: IntArray
    stop_B: IntArray
    num_observed_B: IntArray
    num_entries_GB: list[IntArray]
    observation: Observation | None

    def requests_where(self, is_wanted_B: NDArray[np.bool_]) -> Iterator[tuple[int, Request]]:
        """Those of the forward that have not ended, with their numbers b."""
        for b in np.flatnonzero(is_wanted_B).tolist():
            request = self.requests[self.of[b]]
            if not request.finished:
                yield b, request


class Retainer:
    """Between two steps it decides which entries of the requests that came to a decision point are kept.

    Args:
        options: the policy and its schedule.
        pool: evicts from its tables.
        arena: keys are read where the policy needs their norm.
        layer_groups: per layer the number of its group.
        table: of the routes as they run, for the classes.
    """

    def __init__(
        self,
        options: RetentionOptions,
        pool: KVPool,
        arena: KVArena,
        layer_groups: Sequence[int],
        table: RouteTable,
    ) -> None:
        self.options = options
        self._policy = options.policy
        self._pool = pool
        self._arena = arena
        self._layers = options.observed_layers(len(layer_groups))
        self._groups = [
            [layer for layer, of in enumerate(layer_groups) if of == group]
            for group in range(max(layer_groups) + 1)
        ]
        self._num_observed_layers = [len(set(group) & set(self._layers)) for group in self._groups]
        self._watches = "attention" in self._policy.needs
        if self._watches:
            self._refuse_blind_groups()
        self._class_of_route = torch.tensor(route_classes(options, table))
        self._parts: list[_Part] = []

    def start_step(self) -> None:
        """Forgets what the last step's forwards reported."""
        self._parts = []

    def observe(self, step: PackedStep, of: IntArray) -> Observation | None:
        """What a forward of some of the step's chunks reports: queries in the window before the next decision."""
        row_B, start_B = step.row_C[of], step.start_C[of]
        stop_B = start_B + step.length_C[of]
        observation, num_observed_B = None, self._num_observed(start_B, stop_B)
        num_entries_GB: list[IntArray] = []
        if num_observed_B.any():
            counts_B = torch.from_numpy(num_observed_B)
            observation = Observation(num_observed=dict.fromkeys(self._layers, counts_B))
            for table in self._pool.tables:  # without those that a later query of the row will see
                unseen_B = table.num_seen_R[row_B] - stop_B
                num_entries_GB.append(table.num_kept_R[row_B] - unseen_B)
        self._parts.append(
            _Part(step.requests, of, start_B, stop_B, num_observed_B, num_entries_GB, observation)
        )
        return observation

    def retire(self) -> Retired:
        """When the step's tokens are accepted: takes reports, and evicts where a request has come to a decision.

        Requests that have ended are left alone. A policy that raises leaves the step done, and what it was not asked
        for undecided.
        """
        freed: list[int] = []
        parts, self._parts = self._parts, []
        for part in parts:
            for b in np.flatnonzero(part.start_B == 0).tolist():
                self._start(part.requests[part.of[b]])
            self._take(part)
            for b, request in part.requests_where(part.stop_B % self.options.interval == 0):
                freed += self._decide(request, int(part.stop_B[b]))
        return Retired(num_decisions=len(freed), evicted_entries=sum(freed))

    def _refuse_blind_groups(self) -> None:
        for group, layers in enumerate(self._groups):
            if not self._num_observed_layers[group]:
                raise ValueError(
                    f"layers={list(self._layers)} observes no layer of group {group}, whose entries "
                    f"{self._policy.name} would judge: name one of {layers}"
                )

    def _start(self, request: Request) -> None:
        """Of a new request, and of one that is computed again."""
        if self._watches:
            request.statistics = [EntryStatistics(self.options.decay) for _ in self._groups]
        shape = len(self._groups), request.max_total
        request.evicted_at_GN = np.full(shape, NEVER, np.int32)

    def _num_observed(self, start_B: IntArray, stop_B: IntArray) -> IntArray:
        """Of each chunk the last queries that lie in the window; a chunk never crosses a decision."""
        if not self._watches:
            return np.zeros_like(start_B)
        interval = self.options.interval
        decision_B = -(-stop_B // interval) * interval
        first_B = np.maximum(start_B, decision_B - self.options.window)
        return np.maximum(stop_B - first_B, 0)

    def _take(self, part: _Part) -> None:
        if part.observation is None:
            return
        reporting = list(part.requests_where(part.num_observed_B > 0))
        for group, all_N in part.observation.received.items():
            mean_N = (all_N / self._num_observed_layers[group]).numpy()
            stop_B = np.cumsum(part.num_entries_GB[group])
            first_B = stop_B - part.num_entries_GB[group]
            for b, request in reporting:
                _statistics(request)[group].add(mean_N[first_B[b] : stop_B[b]])

    def _decide(self, request: Request, num_seen: int) -> list[int]:
        """Per layer group, how many entries were evicted."""
        freed = [0] * len(self._groups)
        for group in range(len(self._groups)):
            entries = self._entries(request, num_seen, group)
            guarded_N = self._guarded(entries)
            is_kept_N = self._policy.keep(entries, guarded_N) | guarded_N
            if self.options.compress is not None:
                self._compress(request, group, entries, is_kept_N & ~guarded_N)
            if bool(is_kept_N.all()):
                continue
            gone_N = entries.positions_N[~is_kept_N].numpy()
            assert request.evicted_at_GN is not None
            request.evicted_at_GN[group, gone_N] = num_seen
            if self._watches:
                _statistics(request)[group].keep(is_kept_N)
            freed[group] = self._pool.evict(request.row, group, is_kept_N.numpy())
        return freed

    def _compress(self, request: Request, group: int, entries: Entries, may_be_N: Tensor) -> None:
        if self.options.compress == "class":
            may_be_N = may_be_N & (entries.class_N == _COMPRESS)
        moves = self._pool.tables[group].convert(request.row, may_be_N.numpy())
        if len(moves.after_N):
            for layer in self._groups[group]:
                self._arena.to_int8(layer, moves)

    def _entries(self, request: Request, num_seen: int, group: int) -> Entries:
        table, needs = self._pool.tables[group], self._policy.needs
        kept = int(table.num_kept_R[request.row])
        positions_N = torch.from_numpy(table.positions_RN[request.row, :kept].copy())
        nothing = torch.empty(0)
        last_N = mean_N = key_norm_N = draw_N = ids_S = nothing
        if self._watches:
            last_N, mean_N = _statistics(request)[group].close_window(
                positions_N, num_seen - self.options.window, num_seen
            )
        if "key_norm" in needs:
            key_norm_N = self._key_norms(table.slots_RN[request.row, :kept], group)
        if "draws" in needs:
            hashes_N = torch.from_numpy(request.history.prefix_hash)[positions_N]
            draw_N = draw_levels(hashes_N, self._policy.seed) / DRAW_LEVELS
        if "ids" in needs:
            ids_S = torch.from_numpy(request.history.ids[:num_seen].copy())
        requested_N = torch.from_numpy(request.requested_N)[positions_N].long()
        assert bool((requested_N != UNDECIDED).all()), "an entry of a token without a route"
        return Entries(
            positions_N=positions_N,
            num_seen=num_seen,
            last_N=last_N,
            mean_N=mean_N,
            key_norm_N=key_norm_N,
            draw_N=draw_N,
            class_N=self._class_of_route[requested_N],
            ids_S=ids_S,
            depth=(group + 0.5) / len(self._groups),
        )

    def _guarded(self, entries: Entries) -> Tensor:
        """Sinks, the recent window and protected tokens."""
        options, positions_N = self.options, entries.positions_N
        is_edge_N = (positions_N < options.sinks) | (
            positions_N >= entries.num_seen - options.recent
        )
        return is_edge_N | (entries.class_N == _PROTECT)

    def _key_norms(self, slots_N: IntArray, group: int) -> Tensor:
        """L2 norm of each entry's keys, mean over key heads and the group's layers."""
        index_N = torch.from_numpy(slots_N)
        total_N = torch.zeros(len(index_N))
        for layer in self._groups[group]:
            int8 = self._arena.int8[layer] if self._arena.int8 else None
            entries_NPD = gather(self._arena.layers[layer], int8, index_N)
            keys_NGD = entries_NPD[:, : entries_NPD.shape[1] // 2].float()
            total_N += keys_NGD.norm(dim=-1).mean(-1)
        return total_N / len(self._groups[group])


def _statistics(request: Request) -> list[EntryStatistics]:
    assert request.statistics is not None, (
        "a request whose attention was not watched from its start"
    )
    return request.statistics


def bounds_live(options: RetentionOptions, table: RouteTable) -> bool:
    """Whether ``options.max_live`` holds: protected tokens stay beside any budget, however many there are."""
    return _PROTECT not in route_classes(options, table)


def route_classes(options: RetentionOptions, table: RouteTable) -> list[int]:
    """Per route the index of its retention class; the policy ``route`` may name others.

    Raises:
        ValueError: it names a route that the table does not have; ``high`` and ``low`` may be missing, which conf/
            names for every router, as long as one that it names is there.
    """
    asked = dict(options.policy.classes) if isinstance(options.policy, RouteClass) else {}
    unknown = [name for name in asked if name not in table.names]
    if not set(unknown) <= {"high", "low"} or (unknown and len(unknown) == len(asked)):
        raise ValueError(
            f"classes names the routes {', '.join(asked)}, and the router has {', '.join(table.names)}: leave "
            f"{', '.join(unknown)} out"
        )
    return [CLASSES.index(asked.get(route.name, route.retention)) for route in table.routes]
