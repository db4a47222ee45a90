"""The contract of a label maker: from a window of text to what a router should learn of each of its tokens.

N tokens of a window, L layers or 1, H horizons.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from torch import Tensor

from tokenrouter.models.config import ModelConfig
from tokenrouter.training.gradients import DifferentiableDecoder

Kind = Literal["precision", "retention"]


class LabelMaker(ABC):
    """One way to say how much a token needs: a frozen dataclass of its options, one file, one ``conf/labels`` entry.

    Attributes:
        name: of its config.
        kind: ``precision`` (how much is lost when the token runs low) or ``retention`` (how much its entry will be
            looked at).
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]

    @abstractmethod
    def __call__(self, decoder: DifferentiableDecoder, ids_N: Tensor, seed: int) -> Tensor:
        """Labels of one window.

        Args:
            decoder: of the model and its low path.
            ids_N: int64; the window is a request of its own.
            seed: of what is drawn. Equal seeds give equal labels.

        Returns:
            Float32 ``[N, columns]``, not negative, larger for a token that needs more; NaN where the window does not
            tell. Precision: per layer, so that a subset of layers has the sum as its label, or ``[N, 1]``. Retention:
            per horizon.

        Raises:
            ValueError: a window that the decoder or this maker does not take.
        """

    @abstractmethod
    def columns(self, config: ModelConfig) -> tuple[str, ...]:
        """What each column is about, such as ``layer_0``."""


def layer_columns(config: ModelConfig) -> tuple[str, ...]:
    """A column per layer."""
    return tuple(f"layer_{layer}" for layer in range(config.num_layers))


def check_count(label: str, option: str, value: object) -> None:
    """Raises ValueError unless ``value`` is an integer of at least 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"labels={label}: {option}={value!r} must be an integer of at least 1")
