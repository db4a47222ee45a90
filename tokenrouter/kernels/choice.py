"""The contract of the operators that choose: a token by a row of logits, and what a route is chosen by.

T rows (tokens), V vocabulary, F features, G groups of layers.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from tokenrouter.kernels.values import Cut, RouterTable


class ChoiceKernels(ABC):
    """The part of ``KernelSet`` that chooses."""

    @abstractmethod
    def row_max(self, x_TV: Tensor) -> tuple[Tensor, Tensor]:
        """The largest value of each row, ``[T]``, and its lowest index, int64 ``[T]``; NaN counts as largest."""

    @abstractmethod
    def draw(self, x_TV: Tensor, inverse_temperature_T: Tensor, uniform_T: Tensor) -> Tensor:
        """A random index of each row, by one uniform number: i has the share ``softmax(x * inverse_temperature)[i]``.

        It depends on its own row alone; -inf has no share, and -inf added at the row's end changes nothing.

        Args:
            x_TV: logits; not modified.
            inverse_temperature_T: float32, finite, above 0.
            uniform_T: float64, in [0, 1).

        Returns:
            int64 ``[T]``; -1 where a row holds NaN, infinity, or -inf alone.
        """

    @abstractmethod
    def draw_cut(
        self, x_TV: Tensor, inverse_temperature_T: Tensor, uniform_T: Tensor, cut: Cut
    ) -> Tensor:
        """As ``draw``, from what ``cut`` leaves, in the order of the logits, of equal ones the lower index first."""

    @abstractmethod
    def router_mlp(
        self, values_TF: Tensor, ids_T: Tensor, phase_T: Tensor, table: RouterTable
    ) -> Tensor:
        """The score of a learned router (mlp, linear), float32 ``[T]``: the same bits in every backend and batch.

        Rows of the table are added up, features first, then the id's, then those of the vocabulary. The score is its
        column of the sum and what the hidden units, clipped below at 0, weigh in it; products are added by halves
        (``router_mlp.reference.sum_by_halves``).

        Args:
            values_TF: float32, features in the order of the bins; NaN where one does not exist. Any strides.
            ids_T: int64, at least 0.
            phase_T: int64.
            table: not modified. Gradients flow to its numbers where they are asked for.

        Raises:
            ValueError: tokens that do not fit the bins, or a table that does not fit its head.
        """
