"""A linear model on binned features and ids: the score is a sum of one number per feature."""

from typing import ClassVar

from tokenrouter.routers.artifact import Kind
from tokenrouter.routers.mlp import MLPRouter


class LinearRouter(MLPRouter):
    """See MLPRouter; there are no hidden units."""

    name = "linear"
    kind: ClassVar[Kind] = "linear"
