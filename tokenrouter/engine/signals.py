"""Feeds an engine's Signals: after a step, what its logits and attention say of each request's newest token.

C chunks of a step whose next token is due, V vocabulary, N entries of one request, B requests of a forward, Q entries
of all of them side by side.
"""

import time
from collections.abc import Collection, Sequence
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor

from tokenrouter.engine.observation import ObserveOptions, Observer
from tokenrouter.engine.step import IntArray, PackedStep
from tokenrouter.features.signals import ATTENTION_SIGNALS, LOGIT_SIGNALS, ROW_SIGNALS, Signals
from tokenrouter.features.uncertainty import uncertainty
from tokenrouter.scheduler import Request, Scheduler

RECENT = 16
"""Entries whose attention ``received`` is."""
SINKS = 4
"""Entries whose attention ``sink_share`` is."""
DECAY = 0.9
"""Of ``received_decayed``, per query."""


class SignalFeed:
    """Writes the signals that a router's features read, and keeps them with their request wherever it goes.

    A request that loses its row before its newest token was decided finds the numbers again in its next row; one that
    gets a row for the first time finds none of the row's former owner.

    Args:
        signals: to be written.
        features: names of the router's features; others than those of signals are ignored.
        scheduler: whose load is told.
        observer: reports attention; needed where a feature looks at it, see ``check_observed``.
    """

    def __init__(
        self,
        signals: Signals,
        features: Collection[str],
        scheduler: Scheduler,
        observer: Observer | None,
    ) -> None:
        self._signals = signals
        self._logit_names = [name for name in LOGIT_SIGNALS if name in features]
        self._watches = any(name in features for name in ATTENTION_SIGNALS)
        self._scheduler = scheduler
        self._observer = observer
        self._owners: list[ReferenceType[Request] | None] = [None] * len(signals.position_R)
        self._number_R = np.full(len(signals.position_R), -1)
        self._rows: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._parked: WeakKeyDictionary[Request, tuple[int, Tensor]] = WeakKeyDictionary()

    def start(self, step: PackedStep) -> float:
        """Before the step's tokens are decided: tells the load, and moves numbers to their requests' rows.

        Returns:
            The seconds it took.
        """
        started, pool = time.perf_counter(), self._scheduler.pool
        self._signals.queue_depth = len(self._scheduler.waiting)
        self._signals.pool_use = 1 - pool.available / pool.num_slots
        if self._logit_names or self._watches:
            moved_C = np.flatnonzero(self._number_R[step.row_C] != step.state_C["number"])
            if len(moved_C):
                self._move([step.requests[c] for c in moved_C.tolist()])
        return time.perf_counter() - started

    def take(self, step: PackedStep, due_C: IntArray, logits_CV: Tensor | None) -> float:
        """After the step's tokens were accepted: what is known of the newest one of each request that goes on.

        Args:
            step: its requests still have the rows that they ran in.
            due_C: the chunks whose next token was due.
            logits_CV: that it was drawn from, or forced against; None when no chunk was due.

        Returns:
            The seconds it took.
        """
        started = time.perf_counter()
        tokens, row_C = self._scheduler.tokens, step.row_C[due_C]
        goes_on_C = ~tokens.state_R["finished"][row_C]
        if logits_CV is None or not goes_on_C.any() or not (self._logit_names or self._watches):
            return time.perf_counter() - started
        row_C = row_C[goes_on_C]
        position_C = tokens.history.length_R[row_C] - 1
        rows_C, positions_C = torch.from_numpy(row_C), torch.from_numpy(position_C)
        values: dict[str, Tensor] = {}
        if self._logit_names:
            rows_CV = logits_CV if goes_on_C.all() else logits_CV[torch.from_numpy(goes_on_C)]
            ids_C = torch.from_numpy(tokens.history.ids_RN[row_C, position_C])
            values |= uncertainty(rows_CV, ids_C.to(rows_CV.device), self._logit_names)
        if self._watches:
            values |= self._attention(rows_C)
        self._signals.write(rows_C, positions_C, values)
        return time.perf_counter() - started

    def _move(self, requests: Sequence[Request]) -> None:
        """``requests`` have come into the rows that they have now; the former owners may be among them."""
        signals = self._signals
        for request in requests:
            owner_ref = self._owners[request.row]
            owner = owner_ref() if owner_ref is not None else None
            if owner is not None and not owner.finished and self._rows.get(owner) == request.row:
                self._park(owner)
        for request in requests:
            if request in self._rows:
                self._park(request)
        for request in requests:
            row = request.row
            position, values_S = self._parked.pop(
                request, (-1, torch.full((len(ROW_SIGNALS),), torch.nan))
            )
            signals.position_R[row], signals.values_RS[row] = position, values_S
            self._owners[row], self._rows[request] = ref(request), row
            self._number_R[row] = request.number

    def _park(self, request: Request) -> None:
        row = self._rows.pop(request)
        position, values_S = int(self._signals.position_R[row]), self._signals.values_RS[row]
        self._parked[request] = position, values_S.clone()
        self._number_R[row] = -1

    def _attention(self, rows_C: Tensor) -> dict[str, Tensor]:
        """Of the last query of each request, in the order of ``rows_C``; NaN where it was not observed."""
        assert self._observer is not None, "attention features without an observer"
        found_RA = torch.full((len(self._owners), len(ATTENTION_SIGNALS)), torch.nan)
        for report in self._observer.reports:
            if 0 in report.observation.received:
                row_B = torch.from_numpy(report.step.row_C[report.of])
                size_B = torch.from_numpy(report.stop_B)
                found_RA[row_B] = _row_statistics(report.observation.received[0], size_B)
        found_CA = found_RA[rows_C]
        received_C, sink_share_C, entropy_C = found_CA[:, 0], found_CA[:, 2], found_CA[:, 3]
        column = ROW_SIGNALS.index("received_decayed")
        before_C = self._signals.values_RS[rows_C, column]
        decayed_C = DECAY * before_C + (1 - DECAY) * received_C
        return {
            "received": received_C,
            "received_decayed": torch.where(before_C.isnan(), received_C, decayed_C),
            "sink_share": sink_share_C,
            "last_row_entropy": entropy_C,
        }


def check_observed(
    features: Collection[str], observe: ObserveOptions | None, num_layers: int, who: str
) -> None:
    """Refuses attention features where an engine does not observe what they look at.

    They need the last query of every chunk in all layers, so that a value does not depend on where a chunk began.

    Args:
        features: names of those that router ``who`` asks for.
        observe: the engine's option.
        num_layers: of the model.
        who: the router, for the message.

    Raises:
        ValueError: with the option to set.
    """
    asked = [name for name in ATTENTION_SIGNALS if name in features]
    if not asked:
        return
    fits = (
        observe is not None
        and observe.decode
        and observe.prefill_queries == 1
        and set(observe.prefill_layers) == set(range(num_layers))
    )
    if not fits:
        raise ValueError(
            f"router {who} asks for {', '.join(asked)}, and the engine does not observe the attention that it looks "
            f"at: set observe=ObserveOptions(prefill_layers=tuple(range({num_layers})), prefill_queries=1), without "
            "retention, or leave the feature out"
        )


def _row_statistics(weights_Q: Tensor, size_B: Tensor) -> Tensor:
    """Float32 [B, A], in the order of ATTENTION_SIGNALS without the decay, of rows of attention that lie side by side.

    A row is one query's weights, mean over heads, summed over layers. A request that reports nothing gives NaN.
    """
    num_rows, row_Q = len(size_B), torch.repeat_interleave(torch.arange(len(size_B)), size_B)
    first_B = size_B.cumsum(0) - size_B
    entry_Q = torch.arange(len(weights_Q)) - first_B[row_Q]

    def sums(values_Q: Tensor) -> Tensor:
        return torch.zeros(num_rows).index_add_(0, row_Q, values_Q)

    share_Q = weights_Q / sums(weights_Q)[row_Q]
    received_B = sums(share_Q * (entry_Q >= size_B[row_Q] - RECENT))
    sink_B = sums(share_Q * (entry_Q < SINKS))
    entropy_B = sums(torch.special.entr(share_Q))
    return torch.stack([received_B, received_B, sink_B, entropy_B], dim=1)
