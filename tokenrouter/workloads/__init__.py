"""Texts, prompts and requests to run."""

from tokenrouter.workloads.prompts import DEFAULT_PROMPTS
from tokenrouter.workloads.requests import LengthMix, RequestSpec
from tokenrouter.workloads.text import LocalText, PythonDocs, TextSource, text_hash, windows

__all__ = [
    "DEFAULT_PROMPTS",
    "LengthMix",
    "LocalText",
    "PythonDocs",
    "RequestSpec",
    "TextSource",
    "text_hash",
    "windows",
]
