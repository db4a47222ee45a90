"""From tokens to a feature matrix: what a router asks for by name, and nothing else."""

from tokenrouter.features.base import FeatureFn, FeatureSpec
from tokenrouter.features.extractor import FeatureExtractor
from tokenrouter.features.history import TokenHistory, sequence_batch
from tokenrouter.features.static import FEATURES, check_features, feature_specs
from tokenrouter.features.token_types import TokenType, TokenTypeTable

__all__ = [
    "FEATURES",
    "FeatureExtractor",
    "FeatureFn",
    "FeatureSpec",
    "TokenHistory",
    "TokenType",
    "TokenTypeTable",
    "check_features",
    "feature_specs",
    "sequence_batch",
]
