"""The memory behind the pool.

L layers, S slots and one null slot, P planes (key heads, then value heads), D head size.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tokenrouter.kernels import Int8Entries, QuantizedRows, huge_pages
from tokenrouter.kernels.quantize_rows.reference import quantize_rows
from tokenrouter.kernels.rope_store_kv.reference import store_int8
from tokenrouter.kvcache.moves import Moves


class KVArena:
    """Keys and values of all layers, one row per slot, over one reserved range per form.

    Full entries have slots 0 to S - 1. Slot S is the null slot: zero, and never written, for padding. Entries in int8,
    with a scale per token and plane, have the slots from S + 1 on.

    On the CPU a range is reserved, not touched: a page costs memory when the first token is written to it.

    Args:
        num_layers, num_slots, kv_planes, head_dim: L, S, P, D.
        dtype: of full entries.
        num_int8: slots of entries in int8.
        quantize: a backend's ``quantize_rows``, for full entries that become int8.

    Attributes:
        layers: full entries of each layer, the null slot last: ``[S + 1, P, D]``.
        int8: entries in int8 of each layer; None where there are none.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        kv_planes: int,
        head_dim: int,
        dtype: torch.dtype,
        num_int8: int = 0,
        quantize: Callable[[Tensor], QuantizedRows] = quantize_rows,
    ) -> None:
        self._quantize = quantize
        self.kv_LSPD: Tensor = torch.empty(
            num_layers, num_slots + 1, kv_planes, head_dim, dtype=dtype
        )
        huge_pages.prefer(self.kv_LSPD)
        self.kv_LSPD[:, -1].zero_()
        self.layers: tuple[Tensor, ...] = self.kv_LSPD.unbind()
        self.int8: tuple[Int8Entries, ...] | None = None
        self._int8_bytes = kv_planes * (head_dim + 4) * num_layers
        if num_int8:
            q_LSPD = torch.empty(num_layers, num_int8, kv_planes, head_dim, dtype=torch.int8)
            scale_LSP = torch.empty(num_layers, num_int8, kv_planes)
            huge_pages.prefer(q_LSPD)
            self.int8 = tuple(map(Int8Entries, q_LSPD.unbind(), scale_LSP.unbind()))

    @property
    def null_slot(self) -> int:
        """Index of the null slot."""
        return self.kv_LSPD.shape[1] - 1

    @property
    def is_all_int8(self) -> bool:
        """Whether new tokens are stored in int8: there are no full slots then."""
        return self.null_slot == 0

    @property
    def num_slots(self) -> int:
        """Slots of both forms, the null slot included."""
        return self.null_slot + 1 + (len(self.int8[0].q_SPD) if self.int8 else 0)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one token in full precision occupies over all layers."""
        return self.kv_LSPD[:, 0].numel() * self.kv_LSPD.element_size()

    @property
    def int8_bytes_per_slot(self) -> int:
        """Bytes that one token in int8 occupies over all layers, scales included."""
        return self._int8_bytes

    def small_copy(self, num_layers: int, num_slots: int) -> "KVArena":
        """A new arena with entries of the same form and size, their content undefined: to time work on it."""
        kv_LSPD = self.kv_LSPD
        return KVArena(
            num_layers=num_layers,
            num_slots=0 if self.is_all_int8 else num_slots,
            kv_planes=kv_LSPD.shape[2],
            head_dim=kv_LSPD.shape[3],
            dtype=kv_LSPD.dtype,
            num_int8=num_slots if self.int8 else 0,
        )

    def is_int8(self, slots_N: Tensor) -> Tensor:
        """Which of the slots (int64) hold int8 entries, bool."""
        return slots_N > self.null_slot

    def read(self, layer: int, slots_N: Tensor) -> tuple[Tensor, Int8Entries]:
        """Copies of the full entries among ``slots_N``, and of those in int8, in their order."""
        is_int8_N, kv_SPD = self.is_int8(slots_N), self.layers[layer]
        full = kv_SPD[slots_N[~is_int8_N]]
        if self.int8 is None:
            return full, Int8Entries(torch.empty(0, dtype=torch.int8), torch.empty(0))
        at = slots_N[is_int8_N] - self.null_slot - 1
        return full, Int8Entries(*(part[at] for part in self.int8[layer]))

    def write(
        self, layer: int, slots_N: Tensor, is_int8_N: Tensor, full: Tensor, int8: Int8Entries
    ) -> None:
        """Puts back what ``read`` gave, to other slots of the same forms."""
        self.layers[layer][slots_N[~is_int8_N]] = full
        if self.int8 is not None:
            at = slots_N[is_int8_N] - self.null_slot - 1
            for to, part in zip(self.int8[layer], int8, strict=True):
                to[at] = part

    def to_int8(self, layer: int, moves: Moves) -> None:
        """Quantises full entries of one layer into int8 slots."""
        assert self.int8 is not None
        entries_NPD = self.layers[layer][torch.from_numpy(moves.before_N)]
        slots_N = torch.from_numpy(moves.after_N) - self.null_slot - 1
        store_int8(entries_NPD, slots_N, self.int8[layer], self._quantize)

    def move(self, layer: int, moves: Moves) -> bool:
        """Moves entries of one layer within their form, and gives the memory behind the last of each form back.

        Returns:
            Whether the system took memory.
        """
        first_int8 = self.null_slot + 1
        before, after = torch.from_numpy(moves.before_N), torch.from_numpy(moves.after_N)
        is_int8 = before >= first_int8
        parts = [(self.layers[layer][:-1], before[~is_int8], after[~is_int8])]
        if self.int8 is not None:
            at = before[is_int8] - first_int8, after[is_int8] - first_int8
            parts += [(part, *at) for part in self.int8[layer]]
        gave_back = [_close_ranks(*part) for part in parts]
        return any(gave_back)


def _close_ranks(rows_S: Tensor, before: Tensor, after: Tensor) -> bool:
    """Row ``before[i]`` to row ``after[i]``; the rows behind the last are given back."""
    if len(after):
        rows_S[after] = rows_S[before]
    return huge_pages.give_back(rows_S[len(after) :]) > 0
