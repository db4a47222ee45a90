"""What the entries of one request in one layer group received, window by window.

N entries, oldest first. A window's queries may come in several pieces (chunks, decode tokens): sums do not mind.
"""

import torch
from torch import Tensor


class EntryStatistics:
    """Sums of attention weights, and how many queries could give one, per entry."""

    def __init__(self, decay: float = 1.0) -> None:
        """``decay``: what a window is worth when the next one closes, over 0, at most 1."""
        self._decay = decay
        self._total = torch.zeros(2, 0)  # weights and queries, closed windows
        self._open = torch.zeros(2, 0)  # the same of the window that is not over yet

    def add(self, received_N: Tensor, positions_N: Tensor, first: int, stop: int) -> None:
        """Adds what queries ``first`` to ``stop`` gave.

        Args:
            received_N: float32, summed over these queries, mean over heads and layers.
            positions_N: int64 original positions of the entries; new ones stand at the end.
            first: position of the first query.
            stop: position behind the last one.
        """
        self._open = _padded(self._open, len(received_N))
        self._open[0] += received_N
        self._open[1] += (stop - positions_N.clamp_min(first)).clamp_min(0)

    def copy(self) -> "EntryStatistics":
        """The same sums; what is added to one does not show in the other."""
        twin = EntryStatistics(self._decay)
        twin._total, twin._open = self._total.clone(), self._open.clone()
        return twin

    def close_window(self, num_entries: int) -> tuple[Tensor, Tensor]:
        """Ends the window: mean weight per query that could see the entry, in this window and in all."""
        last = _padded(self._open, num_entries)
        self._total = _padded(self._total, num_entries) * self._decay + last
        self._open = torch.zeros(2, 0)
        mean_N = self._total[0] / self._total[1].clamp_min(1e-9)
        return last[0] / last[1].clamp_min(1), mean_N

    def keep(self, is_kept_N: Tensor) -> None:
        """Drops evicted entries; between windows only."""
        self._total = self._total[:, is_kept_N]


def _padded(sums_2N: Tensor, num_entries: int) -> Tensor:
    """With zeros for entries that are new; never a view of the argument that is longer than before."""
    missing = num_entries - sums_2N.shape[1]
    return torch.nn.functional.pad(sums_2N, (0, missing)) if missing else sums_2N
