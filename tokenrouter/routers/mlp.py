"""A narrow multilayer perceptron on binned features and ids: look-ups, one hidden layer, a head per phase."""

from typing import ClassVar

from torch import Tensor

from tokenrouter.routers.artifact import Artifact, Kind
from tokenrouter.routers.base import Seen
from tokenrouter.routers.learned import LearnedRouter
from tokenrouter.routers.lookup import Scorer
from tokenrouter.types import RouteInput


class MLPRouter(LearnedRouter):
    """See LearnedRouter. The score is the logarithm of the label that is expected, up to a constant."""

    name = "mlp"
    kind: ClassVar[Kind] = "mlp"
    sees: frozenset[Seen] = frozenset({"ids", "positions"})

    def load(self, artifact: Artifact) -> None:
        """See LearnedRouter."""
        self._scorer = Scorer(artifact.bins, artifact.tensors)

    def score(self, inputs: RouteInput) -> Tensor:
        """See LearnedRouter."""
        return self._scorer(inputs.values_TF, inputs.ids_T, inputs.phase_T)[:, 0]
