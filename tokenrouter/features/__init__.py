"""From tokens to a feature matrix: what a router asks for by name, and nothing else."""

from tokenrouter.features.base import FeatureContext, FeatureFn, FeatureSpec
from tokenrouter.features.extractor import FeatureExtractor
from tokenrouter.features.history import HistoryRows, TokenHistory, sequence_batch
from tokenrouter.features.registry import (
    FEATURES,
    check_features,
    feature_specs,
    needs_signals,
    of_one_phase,
    where_they_exist,
)
from tokenrouter.features.signals import Signals, TextSignals
from tokenrouter.features.token_types import TokenType, TokenTypeTable

__all__ = [
    "FEATURES",
    "FeatureContext",
    "FeatureExtractor",
    "FeatureFn",
    "FeatureSpec",
    "HistoryRows",
    "Signals",
    "TextSignals",
    "TokenHistory",
    "TokenType",
    "TokenTypeTable",
    "check_features",
    "feature_specs",
    "needs_signals",
    "of_one_phase",
    "sequence_batch",
    "where_they_exist",
]
