"""Mean keys of blocks, which sparse attention chooses by: kept from step to step, and forgotten with their entries.

L layers, R rows of a slot table, C blocks of a row, G key heads, D head size.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tokenrouter.kvcache.table import SlotTable
from tokenrouter.types import BlockMeans


class MeanKeys:
    """Room for the mean keys of all rows, in float32, which attention fills where it needs them.

    Memory is reserved, not touched: a block costs ``4 G D`` bytes per layer once it has been needed, beside
    ``2 G D`` times the block's length of full bfloat16 or float16 entries. It is not counted as KV.
    """

    def __init__(
        self,
        tables: Sequence[SlotTable],
        layer_groups: Sequence[int],
        *,
        block: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        """For rows of ``tables``, one per layer group; ``layer_groups`` says which one a layer uses.

        Raises:
            ValueError: the system does not even reserve the memory.
        """
        num_rows, max_len = tables[0].slots_RN.shape
        shape = (len(layer_groups), num_rows, num_kv_heads, head_dim, max_len // block + 1)
        self._tables = tables
        self._layers = [
            torch.tensor([layer for layer, of in enumerate(layer_groups) if of == group])
            for group in range(len(tables))
        ]
        self._num_valid_LR: Tensor = torch.zeros(shape[:2], dtype=torch.int64)
        self._seen = [table.num_changes_R.copy() for table in tables]
        try:
            mean_LRGDC = torch.empty(shape)
        except RuntimeError:
            raise ValueError(
                f"mean keys of {num_rows:,} requests of up to {max_len:,} tokens ask for {4 * math.prod(shape):,} "
                "bytes, which the system does not reserve: lower scheduler.max_num_seqs, or raise "
                "executor.low_attention.block"
            ) from None
        self.layers: tuple[BlockMeans, ...] = tuple(
            map(BlockMeans, mean_LRGDC.unbind(), self._num_valid_LR.unbind())
        )

    def forget_changed(self) -> None:
        """Before a forward: what entries have changed otherwise than by new ones has no means any more."""
        for table, layers, seen_R in zip(self._tables, self._layers, self._seen, strict=True):
            changed_R = torch.from_numpy(table.num_changes_R != seen_R)
            if changed_R.any():
                rows = changed_R.nonzero().flatten()
                self._num_valid_LR[layers[:, None], rows] = 0
                seen_R[:] = table.num_changes_R
