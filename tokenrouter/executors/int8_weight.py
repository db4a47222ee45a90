"""Int8 weights per channel, activations of 16 bits (W8A16): the high path of shared weights, or a low path of its own.

On the same weights as the low path ``int8``: the pool of both, ``int8_shared``, stores them once. A step that mixes
them reads a layer's weights once per path, the second time from cache where the layer fits there (3.5 MB with 135M
parameters, 61 MB with 1B: then from memory). The native kernels take a row as two int8 rows, a fixed-point grid of 16
bits of the row's largest magnitude; the reference multiplies in the activations' own dtype. The default model's weights
lie on a 4-bit grid: its rows say nothing about weight quantisation.
"""

from tokenrouter.executors.linear import LinearExecutor
from tokenrouter.kernels import Product


class Int8WeightExecutor(LinearExecutor):
    """Full-precision rows times int8 weights."""

    name = "int8_weight"
    product = Product.INT8_WEIGHT
