"""The plain low path: W8A8, one scale per output channel and one per token.

These are LLM.int8's vector-wise scales (Dettmers et al. 2022, arXiv:2208.07339) without the outlier split.
"""

from tokenrouter.executors.linear import LinearExecutor
from tokenrouter.kernels import Product


class Int8Executor(LinearExecutor):
    """Int8 products of all body linears and lm_head."""

    name = "int8"
    product = Product.INT8
