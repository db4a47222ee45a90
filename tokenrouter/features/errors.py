"""What the low path was measured to cost, by kind of token: what an engine learns while it runs.

Shape letters: N tokens, Y token types, B buckets of ids.
"""

import torch
from torch import Tensor

from tokenrouter.features.token_types import TokenType, TokenTypeTable

NUM_ID_BUCKETS = 256
_MULTIPLIER = 0x9E3779B1  # Knuth's, the golden ratio in 32 bits


def id_buckets(ids_N: Tensor) -> Tensor:
    """The bucket of each id, int64 [N] in 0 .. NUM_ID_BUCKETS - 1: hashed, neighbours apart."""
    return ((ids_N * _MULTIPLIER) >> 16) % NUM_ID_BUCKETS


class ErrorHistory:
    """Mean measured error of low-path tokens per token type and id bucket; empty at first.

    A pair that was never measured takes the mean of its type, a type that was never measured the
    mean of all.
    """

    def __init__(self) -> None:
        self._sum_YB = torch.zeros(len(TokenType), NUM_ID_BUCKETS, dtype=torch.float64)
        self._count_YB = torch.zeros_like(self._sum_YB)
        self._mean_YB: Tensor | None = None

    def record(self, ids_N: Tensor, errors_N: Tensor, types: TokenTypeTable) -> None:
        """Adds measurements; the answers of every router that looks at them change with it.

        Args:
            ids_N: int64 ids of tokens that ran on the low path.
            errors_N: what each cost, 0 or more, in the caller's unit (such as KL in nats).
            types: of the vocabulary.

        Raises:
            ValueError: unequal lengths, or an error that is negative, NaN or infinite.
        """
        if ids_N.shape != errors_N.shape or ids_N.dim() != 1:
            raise ValueError(
                f"one error per token is needed, got ids {list(ids_N.shape)} and errors "
                f"{list(errors_N.shape)}"
            )
        bad_N = ~(errors_N.isfinite() & (errors_N >= 0))
        if bool(bad_N.any()):
            raise ValueError(
                f"errors must be finite and not negative, got {float(errors_N[bad_N][0])}: leave "
                "tokens that were not measured out"
            )
        index = types.types_V[ids_N], id_buckets(ids_N)
        self._sum_YB.index_put_(index, errors_N.double(), accumulate=True)
        self._count_YB.index_put_(index, torch.ones(len(ids_N)).double(), accumulate=True)
        self._mean_YB = None

    def mean(self, ids_T: Tensor, types: TokenTypeTable) -> Tensor:
        """The mean error of tokens like these, float32 [T].

        Raises:
            ValueError: nothing was recorded yet.
        """
        if self._mean_YB is None:
            self._mean_YB = self._means()
        return self._mean_YB[types.types_V[ids_T], id_buckets(ids_T)]

    def _means(self) -> Tensor:
        if not bool(self._count_YB.any()):
            raise ValueError(
                "feature error_history has no measurements yet: call engine.signals.record_error("
                "ids, errors) first, or leave the feature out"
            )
        mean = self._sum_YB.sum() / self._count_YB.sum()
        count_Y1 = self._count_YB.sum(1, keepdim=True)
        mean_Y1 = torch.where(count_Y1 > 0, self._sum_YB.sum(1, keepdim=True) / count_Y1, mean)
        return torch.where(self._count_YB > 0, self._sum_YB / self._count_YB, mean_Y1).float()
