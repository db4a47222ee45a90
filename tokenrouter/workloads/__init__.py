"""Texts, prompts and requests to run."""

from tokenrouter.workloads.azure import AzureTrace
from tokenrouter.workloads.base import RequestSet, RequestSpec, Workload
from tokenrouter.workloads.length_mix import LengthMix
from tokenrouter.workloads.mooncake import MooncakeTrace
from tokenrouter.workloads.prompts import DEFAULT_PROMPTS
from tokenrouter.workloads.synthetic import (
    GammaRequests,
    PoissonRequests,
    RequestKind,
    SeedMix,
    UniformRequests,
)
from tokenrouter.workloads.text import (
    LocalText,
    PythonDocs,
    TextSource,
    calibration_documents,
    evaluation_documents,
    text_hash,
    windows,
)

__all__ = [
    "DEFAULT_PROMPTS",
    "AzureTrace",
    "GammaRequests",
    "LengthMix",
    "LocalText",
    "MooncakeTrace",
    "PoissonRequests",
    "PythonDocs",
    "RequestKind",
    "RequestSet",
    "RequestSpec",
    "SeedMix",
    "TextSource",
    "UniformRequests",
    "Workload",
    "calibration_documents",
    "evaluation_documents",
    "text_hash",
    "windows",
]
