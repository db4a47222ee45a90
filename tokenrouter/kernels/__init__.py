"""The hot operators, one folder each, behind one signature: ``reference.py`` is torch and defines the result.

``select`` returns the operators as one value that is handed to executors and decoder; nothing is chosen globally.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tokenrouter.kernels.attention import reference as attention_reference
from tokenrouter.kernels.attention.reference import AttentionPlan
from tokenrouter.kernels.int8_matmul import reference as int8_matmul_reference
from tokenrouter.kernels.int8_matmul.reference import PackedInt8
from tokenrouter.kernels.matmul import reference as matmul_reference
from tokenrouter.kernels.matmul.reference import PackedMatmul
from tokenrouter.kernels.quantize_rows import reference as quantize_rows_reference
from tokenrouter.kernels.quantize_rows.reference import QuantizedRows
from tokenrouter.kernels.rms_norm import reference as rms_norm_reference
from tokenrouter.kernels.rope_store_kv import reference as rope_store_kv_reference
from tokenrouter.kernels.silu_mul import reference as silu_mul_reference

__all__ = ["AttentionPlan", "KernelSet", "PackedInt8", "PackedMatmul", "QuantizedRows", "select"]

BACKENDS = ("auto", "reference")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSet:
    """One backend's operators. Signatures and shapes are documented at each ``kernels/<op>/reference.py``."""

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    pack_matmul: Callable[[Tensor, Tensor | None], PackedMatmul]
    matmul: Callable[[Tensor, PackedMatmul], Tensor]
    quantize_rows: Callable[[Tensor], QuantizedRows]
    pack_int8: Callable[[Tensor, Tensor | None], PackedInt8]
    int8_matmul: Callable[[QuantizedRows, PackedInt8], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    rope_store_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    plan_attention: Callable[..., AttentionPlan]
    attention: Callable[[Tensor, Tensor, AttentionPlan], Tensor]


def select(backend: str = "auto") -> KernelSet:
    """The operators of ``backend``; raises ValueError with the choices for an unknown one."""
    if backend not in BACKENDS:
        raise ValueError(
            f"unknown kernel backend {backend!r}; choose one of: {', '.join(BACKENDS)}"
        )
    return KernelSet(
        name="reference",
        rms_norm=rms_norm_reference.rms_norm,
        pack_matmul=matmul_reference.pack,
        matmul=matmul_reference.matmul,
        quantize_rows=quantize_rows_reference.quantize_rows,
        pack_int8=int8_matmul_reference.pack,
        int8_matmul=int8_matmul_reference.int8_matmul,
        silu_mul=silu_mul_reference.silu_mul,
        rope_store_kv=rope_store_kv_reference.rope_store_kv,
        plan_attention=attention_reference.plan,
        attention=attention_reference.run,
    )
