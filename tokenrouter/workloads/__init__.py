"""Texts, prompts and requests to run."""

from tokenrouter.workloads.prompts import DEFAULT_PROMPTS
from tokenrouter.workloads.requests import LengthMix, RequestSpec
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
    "LengthMix",
    "LocalText",
    "PythonDocs",
    "RequestSpec",
    "TextSource",
    "calibration_documents",
    "evaluation_documents",
    "text_hash",
    "windows",
]
