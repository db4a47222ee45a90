"""The Triton backend: operators of the GPU, where they have a kernel; the others are torch's."""

from torch import Tensor

from tokenrouter.kernels.checks import check_packed
from tokenrouter.kernels.int8_matmul import triton as int8_matmul_triton
from tokenrouter.kernels.int8_matmul.reference import PackedInt8
from tokenrouter.kernels.quantize_rows import triton as quantize_rows_triton
from tokenrouter.kernels.reference import ReferenceKernels
from tokenrouter.kernels.values import PackedWeights, Product, QuantizedRows


class TritonKernels(ReferenceKernels):
    """See KernelSet; rooflines stand at each ``kernels/<op>/triton.py``."""

    name = "triton"

    def quantize_rows(self, x_TK: Tensor, *, out: QuantizedRows | None = None) -> QuantizedRows:
        """See KernelSet."""
        return quantize_rows_triton.quantize_rows(x_TK, out=out)

    def int8_matmul(
        self,
        rows: QuantizedRows,
        packed: PackedWeights,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """See KernelSet."""
        int8 = check_packed(Product.INT8, packed, PackedInt8)
        return int8_matmul_triton.int8_matmul(rows, int8, out=out, accumulate=accumulate)
