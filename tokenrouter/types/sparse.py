"""Sparse attention: what a query sees where it does not see all that came before it.

T tokens of a forward, R rows of a slot table, C blocks of a row, G key heads, D head size.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseAttention:
    """Sinks, a window, and the blocks between that answer to the query best.

    The query at position p sees the positions below ``sinks``, those from ``window_start(p)`` on, and of the whole
    blocks before that, for each key head, ``top_blocks``: those whose mean key has the largest product with the sum of
    the queries that share the head, of equal ones the earlier. A mean is that of the entries that are kept. All of it
    follows from the query's own past: not from chunks, batches or later tokens.

    Sources: sinks and window from StreamingLLM (Xiao et al. 2023, arXiv:2309.17453); blocks chosen per query from Quest
    (Tang et al. 2024, arXiv:2406.10774), by mean keys from MoBA (Lu et al. 2025, arXiv:2502.13189), alike for the query
    heads of a key head from NSA (Yuan et al. 2025, arXiv:2502.11089).

    Attributes:
        sinks: first positions, 0 or more.
        window: last positions at least, the query's own included, 1 or more; the block that it cuts is in it whole.
        block: positions of a block, 1 or more.
        top_blocks: 0 or more.
    """

    sinks: int = 4
    window: int = 128
    block: int = 16
    top_blocks: int = 16

    def __post_init__(self) -> None:
        for name, least in (("sinks", 0), ("window", 1), ("block", 1), ("top_blocks", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"sparse attention: {name}={value!r} must be a whole number, {least} or more"
                )

    def window_start(self, position: int) -> int:
        """The first position of the window of a query at ``position``."""
        return max(0, position - self.window + 1) // self.block * self.block

    @property
    def first_limited(self) -> int:
        """The first position whose query may not see everything: before it sparse attention is full attention."""
        return (self.top_blocks + 1) * self.block + self.window - 1

    def __str__(self) -> str:
        """``4+128+16x16``: sinks, window, blocks."""
        return f"{self.sinks}+{self.window}+{self.top_blocks}x{self.block}"


class SparseRows(NamedTuple):
    """Which rows of a forward attend sparsely: ``is_sparse_T`` bool."""

    spec: SparseAttention
    is_sparse_T: Tensor


class BlockMeans(NamedTuple):
    """One layer's mean keys, ``mean_RGDC`` float32, which attention brings up to date where it needs them.

    ``num_valid_R`` int64: so many first blocks of a row are up to date. The owner sets it to 0 when the row's entries
    change otherwise than by new ones.
    """

    mean_RGDC: Tensor
    num_valid_R: Tensor
