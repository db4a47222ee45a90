"""What the entries of one request in one layer group received, window by window.

N entries, oldest first. A window's queries may come in several pieces (chunks, decode tokens): sums do not mind.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LEAST_ROOM = 256


class EntryStatistics:
    """Sums of attention weights, and how many queries could give one, per entry."""

    def __init__(self, decay: float = 1.0) -> None:
        """``decay``: what a window is worth when the next one closes, over 0, at most 1."""
        self._decay = decay
        self._total = torch.zeros(2, 0)  # weights and queries, closed windows
        self._open_N = np.zeros(0, np.float32)  # weights of the window that is not over; with room

    def add(self, received_N: NDArray[np.float32]) -> None:
        """Adds what some queries of the open window gave.

        Args:
            received_N: float32, summed over these queries, mean over heads and layers; new entries stand at the end.
        """
        num_entries = len(received_N)
        if num_entries > len(self._open_N):
            room = max(_LEAST_ROOM, 2 * num_entries)
            self._open_N = np.pad(self._open_N, (0, room - len(self._open_N)))
        self._open_N[:num_entries] += received_N

    def copy(self) -> "EntryStatistics":
        """The same sums; what is added to one does not show in the other."""
        twin = EntryStatistics(self._decay)
        twin._total, twin._open_N = self._total.clone(), self._open_N.copy()
        return twin

    def close_window(self, positions_N: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Ends the window: mean weight per query that could see the entry, in this window and in all.

        Args:
            positions_N: int64 original positions of the entries.
            first: position of the window's first query.
            stop: position behind its last one.

        Returns:
            Float32 [N] each; 0 for an entry that no query could see.
        """
        num_entries = len(positions_N)
        last = torch.zeros(2, num_entries)
        open_N = torch.from_numpy(self._open_N[:num_entries])
        last[0, : len(open_N)] = open_N
        last[1] = (stop - positions_N.clamp_min(first)).clamp_min(0)
        missing = num_entries - self._total.shape[1]
        self._total = torch.nn.functional.pad(self._total, (0, missing)) * self._decay + last
        self._open_N = np.zeros(0, np.float32)
        mean_N = self._total[0] / self._total[1].clamp_min(1e-9)
        return last[0] / last[1].clamp_min(1), mean_N

    def keep(self, is_kept_N: Tensor) -> None:
        """Drops evicted entries; between windows only."""
        self._total = self._total[:, is_kept_N]
