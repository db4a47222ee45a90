"""Gives memory back: entries move together, and the pages behind them return to the system.

Freed slots alone free no memory: entries that stay lie scattered over all pages.
"""

from collections.abc import Sequence

from tokenrouter.kvcache.arena import KVArena
from tokenrouter.kvcache.pool import KVPool
from tokenrouter.kvcache.slots import Slots

MIN_SLOTS = 1024  # fewer are not worth a move
MIN_FREE_FRAC = 0.5  # of the slots in use since the last move
PATIENCE_STEPS = 256  # so long they must be free: memory that is given back and soon needed costs more than it frees


class Compactor:
    """Moves every layer group's entries to its first slots and gives the memory of the others back.

    Args:
        pool: its tables get the new slots.
        arena: the entries move in it.
        layer_groups: per layer the number of its group.
    """

    def __init__(self, pool: KVPool, arena: KVArena, layer_groups: Sequence[int]) -> None:
        self._pool = pool
        self._arena = arena
        self._groups = layer_groups
        self._due_steps = 0

    def compact_if_due(self, *, is_idle: bool = False) -> bool:
        """After a step: compacts when ``is_due`` was true after so many in a row; returns whether it did.

        Args:
            is_idle: no request runs or waits: nobody needs the memory soon, and no step may come to count, so that
                ``is_due`` alone decides.
        """
        self._due_steps = self._due_steps + 1 if self.is_due else 0
        if self._due_steps <= (0 if is_idle else PATIENCE_STEPS):
            return False
        self.compact()
        self._due_steps = 0
        return True

    @property
    def is_due(self) -> bool:
        """Whether in some group half of the touched slots, and a thousand, are free.

        A move is paid for then: it copies what is live, which is at most what was freed since the last one.
        """
        return any(_is_sparse(table.slots) for table in self._pool.tables)

    def compact(self) -> int:
        """Moves and gives back; between two steps only. Entries keep rows, order and positions.

        Returns:
            Slots whose memory was given back, mean over the layers; 0 where the system does not take it.
        """
        given_back = 0
        for group, table in enumerate(self._pool.tables):
            num_touched = table.slots.num_touched
            moves = table.close_ranks()
            if self._pool.prefixes is not None:
                self._pool.prefixes.renumber(group, moves)
            layers = [layer for layer, of in enumerate(self._groups) if of == group]
            worked = [self._arena.move(layer, moves) for layer in layers]
            given_back += all(worked) * (num_touched - table.slots.num_touched) * len(layers)
        return given_back // len(self._groups)


def _is_sparse(slots: Slots) -> bool:
    num_unused = slots.num_touched - (slots.num_slots - slots.free)
    return num_unused >= max(MIN_SLOTS, MIN_FREE_FRAC * slots.num_touched)
