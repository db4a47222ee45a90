"""Which entries of a request are kept: policies, one file each, and when they act."""

from tokenrouter.kvcache.retention.base import Budget, Entries, RetentionPolicy, ScoredPolicy
from tokenrouter.kvcache.retention.full import Full
from tokenrouter.kvcache.retention.heavy_hitter import HeavyHitter
from tokenrouter.kvcache.retention.key_norm import KeyNorm
from tokenrouter.kvcache.retention.learned import Learned
from tokenrouter.kvcache.retention.observation_window import ObservationWindow
from tokenrouter.kvcache.retention.options import RetentionOptions
from tokenrouter.kvcache.retention.random import Random
from tokenrouter.kvcache.retention.route import CLASSES, RouteClass
from tokenrouter.kvcache.retention.sink_window import SinkWindow
from tokenrouter.kvcache.retention.statistics import EntryStatistics
from tokenrouter.kvcache.retention.threshold import Threshold

__all__ = [
    "CLASSES",
    "Budget",
    "Entries",
    "EntryStatistics",
    "Full",
    "HeavyHitter",
    "KeyNorm",
    "Learned",
    "ObservationWindow",
    "Random",
    "RetentionOptions",
    "RetentionPolicy",
    "RouteClass",
    "ScoredPolicy",
    "SinkWindow",
    "Threshold",
]
