"""Entries at decision points, as a policy sees them there, and what the rest of the window lost without each.

N entries, S tokens seen, R rows, F features, I intervals, G layer groups.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tokenrouter.kvcache.retention import CLASSES, Entries
from tokenrouter.kvcache.retention.entry_features import entry_features
from tokenrouter.training.retention.store import SummedWindow

Label = Literal["needed", "received"]
LABELS: tuple[Label, ...] = get_args(Label)
_NOTHING = torch.empty(0)


class Rows(NamedTuple):
    """Entries of many decisions.

    Attributes:
        values_RF: float32 features.
        label_R: float32, per interval of the horizon and relative: 1 is an even share of what the window loses.
        weight_R: float32, so that every decision counts the same.
    """

    values_RF: Tensor
    label_R: Tensor
    weight_R: Tensor


def entries_at(window: SummedWindow, group: int, num_seen: int, positions_N: Tensor) -> Entries:
    """Some entries at a decision, by statistics of attention from which nothing was evicted.

    Args:
        window: summed per interval.
        group: of layers.
        num_seen: tokens so far, whole intervals.
        positions_N: int64, ascending.
    """
    received_IN = window.sums.received_GIN[group]
    num_groups, num_intervals, num_tokens = window.sums.received_GIN.shape
    interval = num_tokens // num_intervals
    decided = num_seen // interval
    last_N = received_IN[decided - 1, positions_N]
    all_N = received_IN[:decided, positions_N].sum(0)
    return Entries(
        positions_N=positions_N,
        num_seen=num_seen,
        last_N=last_N / (num_seen - positions_N.clamp_min(num_seen - interval)),
        mean_N=all_N / (num_seen - positions_N),
        key_norm_N=_NOTHING,
        draw_N=_NOTHING,
        class_N=torch.full_like(positions_N, CLASSES.index("normal")),
        ids_S=window.ids_N[:num_seen],
        depth=(group + 0.5) / num_groups,
    )


def make_rows(
    windows: Sequence[SummedWindow],
    *,
    label: Label,
    horizon: int,
    every: int,
    guarded: tuple[int, int],
) -> Rows:
    """Rows of all windows and groups, at every so-many-th decision from the second on.

    Args:
        windows: at least one.
        label: what is learned, see WindowSums.
        horizon: tokens after the decision that count.
        every: decisions from one to the next that is learned from.
        guarded: so many first and last entries are left out, as they never go.
    """
    parts = [
        _window_rows(window, group, label, horizon, every, guarded)
        for window in windows
        for group in range(len(window.sums.received_GIN))
    ]
    return Rows(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _window_rows(
    window: SummedWindow,
    group: int,
    label: Label,
    horizon: int,
    every: int,
    guarded: tuple[int, int],
) -> Rows:
    sums_GIN = window.sums.needed_GIN if label == "needed" else window.sums.received_GIN
    worth_IN = sums_GIN[group]
    num_intervals, num_tokens = worth_IN.shape
    interval, (first, last) = num_tokens // num_intervals, guarded
    even = worth_IN[:, first:].sum() / num_intervals
    parts = []
    for decided in range(2, num_intervals, every):
        num_seen = decided * interval
        if num_seen - last <= first:
            continue
        own = slice(first, num_seen - last)
        values_NF = entry_features(entries_at(window, group, num_seen, torch.arange(num_seen)))
        later_IN = worth_IN[decided : decided + max(horizon // interval, 1), own]
        label_N = later_IN.mean(0) / even.clamp_min(1e-12) * num_seen
        weight_N = torch.full_like(label_N, 1.0 / len(label_N))
        parts.append(Rows(values_NF[own], label_N, weight_N))
    return Rows(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
