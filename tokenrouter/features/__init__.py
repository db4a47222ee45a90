"""From tokens to a feature matrix: what a router asks for by name, and nothing else."""

from tokenrouter.features.base import FeatureContext, FeatureFn, FeatureSpec
from tokenrouter.features.extractor import FeatureExtractor
from tokenrouter.features.history import HistoryRows, TokenHistory, sequence_batch
from tokenrouter.features.registry import FEATURES, check_features, feature_specs, needs_signals
from tokenrouter.features.signals import Signals
from tokenrouter.features.token_types import TokenType, TokenTypeTable

__all__ = [
    "FEATURES",
    "FeatureContext",
    "FeatureExtractor",
    "FeatureFn",
    "FeatureSpec",
    "HistoryRows",
    "Signals",
    "TokenHistory",
    "TokenType",
    "TokenTypeTable",
    "check_features",
    "feature_specs",
    "needs_signals",
    "sequence_batch",
]
