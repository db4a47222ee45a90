"""The high path of shared weights: int8 weights per channel, activations of 16 bits (W8A16).

On the same weights as the low path ``int8``: a pool of both stores them once, and a step that mixes them finds each
linear's weights in cache the second time. The native kernels take a row as two int8 rows, a fixed-point grid of 16 bits
of the row's largest magnitude; the reference multiplies in the activations' own dtype.
"""

from tokenrouter.executors.linear import LinearExecutor
from tokenrouter.kernels import Product


class Int8WeightExecutor(LinearExecutor):
    """Full-precision rows times int8 weights."""

    name = "int8_weight"
    product = Product.INT8_WEIGHT
