"""A pool: the executors that routes name (``high``, ``low``), built once per model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tokenrouter.executors.base import Executor
from tokenrouter.executors.full import FullExecutor
from tokenrouter.executors.int4 import Int4Executor
from tokenrouter.executors.int8 import Int8Executor
from tokenrouter.executors.int8_smooth import Int8SmoothExecutor
from tokenrouter.executors.int8_weight import Int8WeightExecutor
from tokenrouter.executors.packing import PackedModel
from tokenrouter.kernels import KernelSet, huge_pages, select
from tokenrouter.models import LoadedModel
from tokenrouter.types import SparseAttention

ExecutorFactory = Callable[[PackedModel], Executor]
LmHead = Literal["high", "low"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """Which executor each path of a pool uses, how its tokens attend, and whose lm_head those of the low path use.

    A path is an Executor class, or anything that makes one of a PackedModel (in a config: ``_target_`` with
    ``_partial_: true``). Without ``low``, tokens that ask for it run high. With ``low_attention``, a token attends
    sparsely in the layers in which its route runs low; a route may ask for it in all layers (``Route.attention``).
    """

    high: ExecutorFactory = FullExecutor
    low: ExecutorFactory | None = None
    lm_head: LmHead = "high"
    low_attention: SparseAttention | None = None

    def __post_init__(self) -> None:
        if self.lm_head not in ("high", "low"):
            raise ValueError(f"executor.lm_head={self.lm_head!r} must be high or low")
        if self.lm_head == "low" and self.low is None:
            raise ValueError(
                "executor.lm_head=low has no effect without a low executor; set executor=int8"
            )
        if self.low_attention is not None and self.low is None:
            raise ValueError(
                "executor.low_attention has no effect without a low executor; set executor=sparse or int8_sparse"
            )


POOLS: dict[str, PoolSpec] = {
    "full": PoolSpec(),
    "int8": PoolSpec(low=Int8Executor),
    "int8_smooth": PoolSpec(low=Int8SmoothExecutor),
    "int8_shared": PoolSpec(high=Int8WeightExecutor, low=Int8Executor),
    "int8_weight": PoolSpec(low=Int8WeightExecutor),
    "int4": PoolSpec(low=Int4Executor),
    "sparse": PoolSpec(low=FullExecutor, low_attention=SparseAttention()),
    "int8_sparse": PoolSpec(low=Int8Executor, low_attention=SparseAttention()),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorPool:
    """Executors by path name, and how low tokens attend and whose lm_head they use. Several engines may share it."""

    executors: Mapping[str, Executor]
    lm_head: LmHead
    kernels: KernelSet
    low_attention: SparseAttention | None = None

    @property
    def shares_weights(self) -> bool:
        """Whether all paths read the same weight tensors: then mixing them brings no others into the cache."""
        first, *others = (executor.packed_weights for executor in self.executors.values())
        return bool(others) and all(
            len(other) == len(first) and all(map(_is_same, first, other)) for other in others
        )

    @property
    def low_name(self) -> str | None:
        """Name of the low path's executor; None without a low path."""
        low = self.executors.get("low")
        return low.name if low is not None else None

    @property
    def description(self) -> str:
        """For tables and provenance: ``high=full, low=int8, lm_head=high``, by the executors' versions."""
        paths = [f"{path}={executor.version}" for path, executor in self.executors.items()]
        sparse = [f"low_attention={self.low_attention}"] if self.low_attention else []
        return ", ".join([*paths, *sparse, f"lm_head={self.lm_head}"])


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one piece of memory; oneDNN's opaque ones have no address to compare."""
    return a is b or (not a.is_mkldnn and not b.is_mkldnn and a.data_ptr() == b.data_ptr())


def build_pool(
    spec: PoolSpec | str, model: LoadedModel, *, kernels: KernelSet | str = "auto"
) -> ExecutorPool:
    """Builds the executors of ``spec`` (a PoolSpec, or the name of one in ``POOLS``) for ``model``.

    Args:
        spec: executors that use the same format share its packed weights.
        model: read only.
        kernels: a backend, or the name of one (``tokenrouter.kernels.select``).
    """
    if isinstance(spec, str):
        if spec not in POOLS:
            raise ValueError(f"unknown executor pool {spec!r}; choose one of: {', '.join(POOLS)}")
        spec = POOLS[spec]
    if isinstance(kernels, str):
        kernels = select(kernels, dtype=model.dtype)
    packed = PackedModel(model, kernels)
    executors = {"high": spec.high(packed)}
    if spec.low is not None:
        executors["low"] = spec.low(packed)
    for executor in executors.values():
        huge_pages.collapse(executor.packed_weights)
    return ExecutorPool(
        executors=executors,
        lm_head=spec.lm_head,
        kernels=kernels,
        low_attention=spec.low_attention,
    )
