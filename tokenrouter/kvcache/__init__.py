"""Token-granular KV memory: the arena holds entries, the pool says whose they are, per layer group."""

from tokenrouter.kvcache.arena import KVArena
from tokenrouter.kvcache.compaction import Compactor
from tokenrouter.kvcache.host import HostTier, Swapped
from tokenrouter.kvcache.mean_keys import MeanKeys
from tokenrouter.kvcache.pool import KVPool
from tokenrouter.kvcache.prefix import PrefixCache
from tokenrouter.kvcache.stretch import Prefix, Stretch
from tokenrouter.kvcache.table import SlotTable

__all__ = [
    "Compactor",
    "HostTier",
    "KVArena",
    "KVPool",
    "MeanKeys",
    "Prefix",
    "PrefixCache",
    "SlotTable",
    "Stretch",
    "Swapped",
]
