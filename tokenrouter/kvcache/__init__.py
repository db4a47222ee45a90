"""Token-granular KV memory: the arena holds entries, the pool says whose they are."""

from tokenrouter.kvcache.arena import KVArena
from tokenrouter.kvcache.pool import KVPool

__all__ = ["KVArena", "KVPool"]
