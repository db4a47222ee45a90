"""The contract of a backend: the hot operators of a forward.

T rows (tokens), E features, K inputs and N outputs of a product, J = 2 I fused gate and up, O = (H + 2 G) D fused
q, k, v, H query heads, G key heads, D head size, S slots, P = 2 G planes of an entry (key heads, then value heads).

``kernels/<op>/reference.py`` defines each operator in torch. ``out``, where an operator takes it, is the tensor that it
writes its result to and returns; it must not overlap an input, and without it a new one is made. ``accumulate`` adds to
``out``, so it needs one.

Every backend raises ValueError, before anything is written, for rows, weights, biases, scales and results of products
that do not fit each other, for packed weights of another format or backend, and for ``accumulate`` without ``out``. The
native one also checks every dtype, stride and device, and raises IndexError for rows, slots and ids outside of their
tables.
Rows that are quantised, or multiplied by int8 weights, hold finite numbers or NaN: what becomes of a row with an
infinity is left open.
"""

from abc import abstractmethod
from typing import Any, Self

from torch import Tensor

from tokenrouter.kernels.attending import AttentionKernels
from tokenrouter.kernels.choice import ChoiceKernels
from tokenrouter.kernels.layer_tail import ComposedTail, TailWeights
from tokenrouter.kernels.values import (
    LayerTail,
    Norm,
    PackedWeights,
    Product,
    QuantizedRows,
)


class KernelSet(AttentionKernels, ChoiceKernels):
    """One backend's operators. Rows may be strided, features are neighbours."""

    name: str

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: a copy of what holds a backend, such as a router, runs the same one."""
        return self

    @abstractmethod
    def rms_norm(
        self,
        x_TE: Tensor,
        weight_E: Tensor,
        eps: float,
        *,
        residual_TE: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """RMS norm of rows; with ``residual_TE``, x is added to it in place and the sum is normed. ``out`` may be x."""

    @abstractmethod
    def rms_norm_quantize(
        self,
        x_TE: Tensor,
        weight_E: Tensor,
        eps: float,
        *,
        residual_TE: Tensor | None = None,
        out: QuantizedRows | None = None,
    ) -> QuantizedRows:
        """``quantize_rows`` of ``rms_norm``."""

    @abstractmethod
    def quantize_rows(self, x_TK: Tensor, *, out: QuantizedRows | None = None) -> QuantizedRows:
        """Symmetric int8 rows, one scale each."""

    @abstractmethod
    def silu_mul(self, gate_up_TJ: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``silu(gate) * up``: ``[T, I]``."""

    @abstractmethod
    def pack_matmul(
        self, weight_NK: Tensor, bias_N: Tensor | None, *, gated: bool = False
    ) -> PackedWeights:
        """Packs weights of any float dtype for ``matmul``; the originals are not modified.

        ``gated`` weights are gate rows, then as many up rows: products return ``silu(gate) * up``, ``[T, N / 2]``.

        Raises:
            ValueError: no outputs or no inputs, a bias that is not ``[N]``, or an odd number of gated rows.
        """

    @abstractmethod
    def matmul(
        self,
        x_TK: Tensor,
        packed: PackedWeights,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """``x @ weight.T + bias`` in the weight's dtype."""

    @abstractmethod
    def pack_int8(
        self, weight_NK: Tensor, bias_N: Tensor | None, *, gated: bool = False
    ) -> PackedWeights:
        """Quantises weights per output channel and packs them for ``int8_matmul`` and ``int8_weight_matmul``.

        Raises:
            ValueError: as ``pack_matmul``, and for more than 133,144 inputs, whose sums may leave int32.
        """

    @abstractmethod
    def int8_matmul(
        self,
        rows: QuantizedRows,
        packed: PackedWeights,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """W8A8 product in the rows' original dtype. A row's result is the same bit for bit in any batch."""

    @abstractmethod
    def int8_weight_matmul(
        self,
        x_TK: Tensor,
        packed: PackedWeights,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """Full-precision rows times int8 weights, in the rows' dtype."""

    @abstractmethod
    def pack_int4(
        self, weight_NK: Tensor, bias_N: Tensor | None, *, gated: bool = False
    ) -> PackedWeights:
        """Quantises weights in groups of 32 inputs and packs them for ``int4_matmul``.

        Raises:
            ValueError: as ``pack_int8``.
        """

    @abstractmethod
    def int4_matmul(
        self,
        rows: QuantizedRows,
        packed: PackedWeights,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """W4A8 product in the rows' original dtype. A row's result is the same bit for bit in any batch."""

    @abstractmethod
    def routed_matmul(
        self,
        high_TK: Tensor,
        high: PackedWeights,
        low: QuantizedRows,
        low_packed: PackedWeights,
        *,
        out: Tensor,
        accumulate: bool = False,
    ) -> Tensor:
        """High rows, then low rows, each by its own weights, into one ``out``.

        ``high`` holds the full dtype or int8 (then it may be ``low_packed`` itself, which is read once for both).
        """

    def project(
        self,
        product: Product,
        x_TK: Tensor,
        packed: PackedWeights,
        *,
        norm: Norm | None = None,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """A linear of a layer: the norm where there is one, quantisation where ``product`` needs it, the product.

        Here the operators above, one after the other; a backend may do it in one call, with the same result bit by bit.
        """
        if product.quantizes_rows:
            rows = self.rms_norm_quantize(x_TK, *norm) if norm else self.quantize_rows(x_TK)
            by_rows = self.int8_matmul if product is Product.INT8 else self.int4_matmul
            return by_rows(rows, packed, out=out, accumulate=accumulate)
        if norm is not None:
            x_TK = self.rms_norm(x_TK, norm.weight_E, norm.eps)
        multiply = self.matmul if product is Product.DENSE else self.int8_weight_matmul
        return multiply(x_TK, packed, out=out, accumulate=accumulate)

    def layer_tail(self, product: Product, weights: TailWeights) -> LayerTail:
        """Prepares the ``project`` of out, gate_up, down and the next layer's q, k, v as one operator.

        Here they run one after the other; a backend may do it in one call, with the same result bit for bit.
        """
        return ComposedTail(kernels=self, product=product, weights=weights)
