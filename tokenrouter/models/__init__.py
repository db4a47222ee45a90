"""Checkpoints of the Llama family and the one decoder that runs them."""

from tokenrouter.models.config import SUPPORTED, ModelConfig
from tokenrouter.models.decoder import Decoder, ForwardTimes, Observation, TokenOps
from tokenrouter.models.loader import LoadedModel, load_model
from tokenrouter.models.tiny import tiny_random

__all__ = [
    "SUPPORTED",
    "Decoder",
    "ForwardTimes",
    "LoadedModel",
    "ModelConfig",
    "Observation",
    "TokenOps",
    "load_model",
    "tiny_random",
]
