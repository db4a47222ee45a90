"""A narrow multilayer perceptron on binned features and ids: look-ups, one hidden layer, a head per phase."""

from typing import ClassVar

from torch import Tensor

from tokenrouter.kernels import KernelSet, ReferenceKernels
from tokenrouter.routers.artifact import Artifact, Kind
from tokenrouter.routers.base import Seen
from tokenrouter.routers.learned import LearnedRouter
from tokenrouter.routers.lookup import router_table
from tokenrouter.types import RouteInput


class MLPRouter(LearnedRouter):
    """See LearnedRouter. The score is the logarithm of the label that is expected, up to a constant."""

    name = "mlp"
    kind: ClassVar[Kind] = "mlp"
    sees: frozenset[Seen] = frozenset({"ids", "positions"})

    _kernels: KernelSet = ReferenceKernels()

    def use_kernels(self, kernels: KernelSet) -> None:
        """See Router."""
        self._kernels = kernels

    def load(self, artifact: Artifact) -> None:
        """See LearnedRouter."""
        self._table = router_table(artifact.bins, artifact.tensors)

    def score(self, inputs: RouteInput) -> Tensor:
        """See LearnedRouter."""
        return self._kernels.router_mlp(inputs.values_TF, inputs.ids_T, inputs.phase_T, self._table)
