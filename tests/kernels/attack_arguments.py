"""Random arguments for ``attack``: right, nearly right or wrong, in memory that shows what was written beside them."""

import random

import torch
from torch import Tensor

from tokenrouter.kernels import QuantizedRows

CANARY = 77
SIZES = (0, 1, 2, 3, 7, 16, 17, 32, 33, 64, 65)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64)
ODD_INTS = (-(2**63), -(2**40), -2, -1, 2**31, 2**40, 2**62, 2**63 - 1)


class Arguments:
    """Random arguments; most of them right, so that calls get past the first check."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._rooms: list[tuple[Tensor, Tensor]] = []

    def size(self) -> int:
        return self._random.choice(SIZES)

    def rarely(self) -> bool:
        return self._random.random() < 0.06

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Of the shape and dtype asked for, or nearly so; inside a larger buffer of canaries."""
        wanted = [self.size() if self.rarely() else n for n in shape]
        if self.rarely():
            wanted = [*wanted, 1] if self._random.random() < 0.5 else wanted[:-1]
        if self.rarely():
            dtype = self._random.choice(DTYPES)
        if self.rarely():
            return torch.zeros(*wanted, dtype=dtype).expand(wanted)[..., ::2]
        if self.rarely():
            return torch.zeros(1, dtype=dtype).expand(wanted or [1])
        room = torch.full((torch.Size(wanted).numel() + 256,), CANARY, dtype=dtype)
        inside = room[128:-128].view(wanted)
        inside.copy_(torch.randint(-3, 4, wanted))
        self._rooms.append((room, room.clone()))
        return inside

    def ints(self, values: list[int]) -> Tensor:
        """Int64 values of which one may be very wrong."""
        if values and self.rarely():
            values[self._random.randrange(len(values))] = self._random.choice(ODD_INTS)
        made = torch.tensor(values, dtype=torch.int64)
        return made.int() if self.rarely() else made

    def choice(self, dtypes: tuple[torch.dtype, ...] = DTYPES[:2]) -> torch.dtype:
        return self._random.choice(dtypes)

    def check_canaries(self, *, unchanged: bool = False) -> None:
        """Nothing but the tensors was written; ``unchanged``: nor were they."""
        for room, before in self._rooms:
            assert (room[:128] == CANARY).all() and (room[-128:] == CANARY).all(), "out of bounds"
            assert not unchanged or torch.equal(room, before), "a refused call has written"
        self._rooms.clear()

    def rows(self, num_rows: int, width: int, dtype: torch.dtype) -> QuantizedRows:
        scale = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        q_TK = self.tensor(num_rows, width, dtype=torch.int8)
        return QuantizedRows(q_TK, self.tensor(num_rows, 1, dtype=scale), dtype)
