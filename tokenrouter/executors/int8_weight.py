"""The high path of shared weights: int8 weights per channel, activations of 16 bits (W8A16).

On the same weights as the low path ``int8``: a pool of both stores them once, and a step that mixes them finds each
linear's weights in cache the second time. The native kernels take a row as two int8 rows, a fixed-point grid of 16 bits
of the row's largest magnitude; the reference multiplies in the activations' own dtype.
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
