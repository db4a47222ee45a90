"""TokenRouter: a research framework that decides per token how LLM inference computes."""

from tokenrouter.engine import LLM, EngineOptions, ObserveOptions
from tokenrouter.outputs import CompletionOutput, RequestOutput
from tokenrouter.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineOptions",
    "ObserveOptions",
    "RequestOutput",
    "SamplingParams",
]
__version__ = "0.1.0"
