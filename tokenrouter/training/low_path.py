"""What the low path multiplies by, before rounding: the layers that labels compare the high path with."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from tokenrouter.executors import PoolSpec
from tokenrouter.executors.int4 import Int4Executor
from tokenrouter.executors.int8 import Int8Executor
from tokenrouter.executors.int8_smooth import Int8SmoothExecutor
from tokenrouter.executors.int8_weight import Int8WeightExecutor
from tokenrouter.executors.smoothing import Smoothing
from tokenrouter.kernels import Product
from tokenrouter.models import LoadedModel
from tokenrouter.models.weights import LayerWeights

PLAIN = (Int8Executor, Int4Executor, Int8WeightExecutor)
KNOWN = " or ".join(
    (", ".join(f"executor={made.name}" for made in PLAIN), f"executor={Int8SmoothExecutor.name}")
)


class LowPath(Protocol):
    """A path of a model whose linears are one kind of product."""

    @property
    def executor(self) -> str:
        """Name of the executor that it stands for, such as ``int8_smooth``."""
        ...

    @property
    def product(self) -> Product:
        """What its linears are."""
        ...

    @property
    def version(self) -> str:
        """Of what is folded into the layers, such as a calibration; empty without any."""
        ...

    def layers(self) -> Iterable[LayerWeights]:
        """Norms and linears from the first layer to the last, not yet rounded; asked for once per decoder."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainLow:
    """The layers of ``int8`` and of others that round the model's own."""

    model: LoadedModel
    executor: str = Int8Executor.name
    product: Product = Int8Executor.product
    version: str = ""

    def layers(self) -> Iterable[LayerWeights]:
        """See LowPath."""
        return self.model.weights.layers


class Int8SmoothLow:
    """The layers of ``int8_smooth``: folded, with maxima measured on ``model``."""

    executor, product = Int8SmoothExecutor.name, Int8SmoothExecutor.product

    def __init__(self, model: LoadedModel, smoothing: Smoothing) -> None:
        """Calibrates, or reads the calibration; raises ValueError where ``model`` cannot be calibrated."""
        self._model, self._smoothing = model, smoothing
        self.version = smoothing.fold(model).version

    def layers(self) -> Iterable[LayerWeights]:
        """See LowPath."""
        return self._smoothing.fold(self._model).layers


def low_path(spec: PoolSpec, model: LoadedModel) -> LowPath:
    """The low path of a pool, on ``model``.

    Args:
        spec: of ``conf/executor``.
        model: in float32, since it is what the high path is measured with.

    Raises:
        ValueError: the pool has no low path, or one whose error labels cannot compute.
    """
    if spec.low is None:
        raise ValueError(
            "labels say how much a token loses on the low path, and this executor has none: set "
            f"{KNOWN}"
        )
    made = getattr(spec.low, "func", spec.low)
    options = getattr(spec.low, "keywords", {})
    for plain in PLAIN:
        if made is plain:
            return PlainLow(model=model, executor=plain.name, product=plain.product)
    if made is Int8SmoothExecutor:
        return Int8SmoothLow(model, options.get("smoothing") or Smoothing())
    name = getattr(made, "name", getattr(made, "__name__", repr(made)))
    raise ValueError(f"labels cannot compute the error of the low path {name!r}: set {KNOWN}")
