"""The plain high path: weights and activations in the dtype that the model was loaded in."""

from tokenrouter.executors.linear import LinearExecutor
from tokenrouter.kernels import Product


class FullExecutor(LinearExecutor):
    """Dense products."""

    name = "full"
    product = Product.DENSE
