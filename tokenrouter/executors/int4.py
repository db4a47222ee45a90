"""A low path of half the weights: W4A8, groups of 32 inputs with 4-bit codes, activations as in ``int8``.

QServe's progressive groups (Lin et al. 2024, arXiv:2405.04532): codes expand to int8 without rounding, so that products
are those of ``int8``; ``kernels/int4_matmul/reference.py`` has the format and its error. Nothing is calibrated: weights
are rounded to the nearest code, and activations are not smoothed.

The default model says nothing about weight quantisation: its weights come from a Q4_1 file, so they lie on a 4-bit grid
of the same groups of 32 already, and what another 4-bit grid loses on them is not what it loses on weights of 16 bits.
Judge it on another model.
"""

from tokenrouter.executors.linear import LinearExecutor
from tokenrouter.kernels import Product


class Int4Executor(LinearExecutor):
    """4-bit products of all body linears and lm_head."""

    name = "int4"
    product = Product.INT4
