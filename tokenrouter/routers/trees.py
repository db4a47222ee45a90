"""Gradient-boosted trees on features, by LightGBM, in its own text format.

Ke et al. 2017, LightGBM: A Highly Efficient Gradient Boosting Decision Tree.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from tokenrouter.routers.artifact import Artifact, Kind
from tokenrouter.routers.base import Seen
from tokenrouter.routers.learned import LearnedRouter
from tokenrouter.types import RouteInput


class TreesRouter(LearnedRouter):
    """See LearnedRouter. Needs lightgbm, which ``pip install tokenrouter[trees]`` brings."""

    name = "trees"
    kind: ClassVar[Kind] = "trees"
    sees: frozenset[Seen] = frozenset({"positions"})

    def load(self, artifact: Artifact) -> None:
        """See LearnedRouter; raises ValueError where lightgbm is not installed or does not read the trees."""
        lightgbm = import_lightgbm()
        try:
            self._booster = lightgbm.Booster(model_str=artifact.text)
        except lightgbm.basic.LightGBMError as error:
            raise ValueError(f"lightgbm cannot read the trees of this router: {error}") from None

    def score(self, inputs: RouteInput) -> Tensor:
        """See LearnedRouter."""
        if not len(inputs):
            return torch.empty(0)
        score_T = self._booster.predict(inputs.values_TF.numpy(), raw_score=True, num_threads=1)
        return torch.from_numpy(score_T).float()


def import_lightgbm() -> Any:
    """The library, which is loaded when trees are used; raises ValueError where it is not installed."""
    try:
        import lightgbm
    except ImportError as error:
        raise ValueError(
            f"router=trees needs lightgbm ({error}): pip install 'tokenrouter[trees]', or choose router=mlp"
        ) from None
    return lightgbm
