"""The high path of shared weights: int8 weights per channel, bfloat16 activations (W8A16).

On the same weights as the low path ``int8``: a step that mixes both streams and stores them once.
"""

from collections.abc import Callable

from torch import Tensor

from tokenrouter.executors.full import FullActivationExecutor
from tokenrouter.executors.packing import PackedLinears, PackedModel


class Int8WeightExecutor(FullActivationExecutor):
    """Full-precision rows times int8 weights."""

    name = "int8_weight"

    def _choose(self, packed: PackedModel) -> tuple[PackedLinears, Callable[..., Tensor]]:
        return packed.int8, packed.kernels.int8_weight_matmul
