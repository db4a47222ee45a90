"""The memory behind the pool.

L layers, S slots and one null slot, P planes (key heads, then value heads), D head size.
"""

import torch
from torch import Tensor

from tokenrouter.kernels import huge_pages


class KVArena:
    """Keys and values of all layers, one row per slot, over one reserved range.

    On the CPU the range is reserved, not touched: a page costs memory when the first token is written to it. The row
    after the last slot is the null slot: zero, and never written, for padding.
    """

    def __init__(
        self, *, num_layers: int, num_slots: int, kv_planes: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self.kv_LSPD: Tensor = torch.empty(
            num_layers, num_slots + 1, kv_planes, head_dim, dtype=dtype
        )
        huge_pages.prefer(self.kv_LSPD)
        self.kv_LSPD[:, -1].zero_()
        self.layers: tuple[Tensor, ...] = self.kv_LSPD.unbind()

    @property
    def null_slot(self) -> int:
        """Index of the null slot."""
        return self.kv_LSPD.shape[1] - 1

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one token occupies over all layers."""
        return self.kv_LSPD[:, 0].numel() * self.kv_LSPD.element_size()
