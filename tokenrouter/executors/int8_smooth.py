"""The low path at its best: W8A8 of smoothed layers, by the same products in the same time as ``int8``.

SmoothQuant (Xiao et al. 2023, arXiv:2211.10438).
"""

from tokenrouter.executors.linear import LinearExecutor
from tokenrouter.executors.packing import PackedLinears, PackedModel
from tokenrouter.executors.smoothing import Smoothing
from tokenrouter.kernels import Product


class Int8SmoothExecutor(LinearExecutor):
    """Int8 products of all body linears and lm_head; norms and linears are its own, with scales folded in."""

    name = "int8_smooth"
    product = Product.INT8

    def __init__(self, packed: PackedModel, smoothing: Smoothing | None = None) -> None:
        """``smoothing``: by default alpha 0.5 on 2,048 tokens of the default text. Raises what it raises."""
        self._smoothing = smoothing or Smoothing()
        super().__init__(packed)

    def _choose_linears(self, packed: PackedModel) -> PackedLinears:
        return packed.int8_folded(self._smoothing)
