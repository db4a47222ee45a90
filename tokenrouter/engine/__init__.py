"""Where the two levels meet."""

from tokenrouter.engine.build import build_engine
from tokenrouter.engine.engine import LLMEngine
from tokenrouter.engine.llm import LLM
from tokenrouter.engine.observation import ObserveOptions
from tokenrouter.engine.options import EngineOptions
from tokenrouter.engine.stats import EngineStats
from tokenrouter.scheduler import QueueFullError

__all__ = [
    "LLM",
    "EngineOptions",
    "EngineStats",
    "LLMEngine",
    "ObserveOptions",
    "QueueFullError",
    "build_engine",
]
