"""One text, token by token: which route each took and why, as a page and as a picture."""

from tokenrouter.evaluation.explain.page import html_page
from tokenrouter.evaluation.explain.picture import draw
from tokenrouter.evaluation.explain.tokens import (
    ExplainedToken,
    Explanation,
    gather,
    token_texts,
    visible,
    watched,
)

__all__ = [
    "ExplainedToken",
    "Explanation",
    "draw",
    "gather",
    "html_page",
    "token_texts",
    "visible",
    "watched",
]
