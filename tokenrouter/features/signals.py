"""What a running engine knows beside a step's tokens: the numbers that dynamic features read.

Shape letters: T tokens in a step, R rows of the pool, C of them that are written, S signals of a
row, N tokens.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tokenrouter.features.errors import ErrorHistory
from tokenrouter.features.token_types import TokenTypeTable
from tokenrouter.types import TokenBatch

LOGIT_SIGNALS = ("entropy", "margin", "top1", "surprise")
"""Of the logits that the newest token was drawn from, or forced against."""
ATTENTION_SIGNALS = ("received", "received_decayed", "sink_share", "last_row_entropy")
"""Of the attention that the token before the newest gave."""
ROW_SIGNALS = LOGIT_SIGNALS + ATTENTION_SIGNALS


class Signals:
    """Per row of the pool, what is known of its request's newest token; the load; measured errors.

    A row's numbers belong to one position and are read for that position alone: what was not
    written, or for another token, is refused.

    Args:
        num_rows: R.
        types: of the vocabulary.

    Attributes:
        values_RS: float32, columns in the order of ``ROW_SIGNALS``; NaN until written.
        position_R: int64, the position that they are for; -1: none.
        queue_depth: requests that wait, NaN before the first step.
        pool_use: share of the KV slots that no request could get now, NaN before the first step.
    """

    def __init__(self, num_rows: int, types: TokenTypeTable) -> None:
        self.values_RS = torch.full((num_rows, len(ROW_SIGNALS)), math.nan)
        self.position_R = torch.full((num_rows,), -1)
        self.queue_depth = math.nan
        self.pool_use = math.nan
        self._types = types
        self._errors = ErrorHistory()

    def write(self, rows_C: Tensor, positions_C: Tensor, values: Mapping[str, Tensor]) -> None:
        """The newest tokens of rows, now at ``positions_C``; signals that are not given become NaN.

        Args:
            rows_C: int64 rows of the pool.
            positions_C: int64 positions of their newest tokens.
            values: float32 [C] by signal.
        """
        values_CS = torch.full((len(rows_C), len(ROW_SIGNALS)), math.nan)
        for name, value_C in values.items():
            values_CS[:, ROW_SIGNALS.index(name)] = value_C
        self.values_RS[rows_C] = values_CS
        self.position_R[rows_C] = positions_C

    def row_value(self, name: str, batch: TokenBatch) -> Tensor:
        """A signal of ``ROW_SIGNALS`` for each token, float32 [T].

        Raises:
            ValueError: it is not known for one of them.
        """
        value_T = self.values_RS[:, ROW_SIGNALS.index(name)][batch.row_T]
        known_T = (self.position_R[batch.row_T] == batch.positions_T) & ~value_T.isnan()
        if not bool(known_T.all()):
            position = int(batch.positions_T[~known_T][0])
            raise ValueError(
                f"feature {name} is not known for the token at position {position}: it exists for "
                "the newest token of a request that runs, whose logits were numbers"
            )
        return value_T

    def load(self, name: str, batch: TokenBatch) -> Tensor:
        """``queue_depth`` or ``pool_use``, the same for every token, float32 [T].

        Raises:
            ValueError: no step has begun.
        """
        value = float(getattr(self, name))
        if math.isnan(value):
            raise ValueError(
                f"feature {name} is not known before the engine's first step: a router that is "
                "asked at admission cannot look at it"
            )
        return torch.full((len(batch),), value)

    def record_error(self, ids_N: Tensor, errors_N: Tensor) -> None:
        """Adds measured errors of low-path tokens to what ``error_history`` reads.

        Args:
            ids_N: int64 token ids.
            errors_N: what each cost on the low path, 0 or more, such as KL in nats.

        Raises:
            ValueError: unequal lengths, or an error that is negative, NaN or infinite.
        """
        self._errors.record(ids_N, errors_N, self._types)

    def mean_error(self, batch: TokenBatch) -> Tensor:
        """The mean measured error of tokens of the same type and id bucket, float32 [T].

        Raises:
            ValueError: none was recorded.
        """
        return self._errors.mean(batch.ids_T, self._types)


class TextSignals(Signals):
    """Row signals of all tokens of one text, where one pass over it gave them: no engine runs it token by token.

    Args:
        types: of the vocabulary.
        values: float32 [N] by signal of ``ROW_SIGNALS``, one number per position; NaN where it is not known.
    """

    def __init__(self, types: TokenTypeTable, values: Mapping[str, Tensor]) -> None:
        super().__init__(1, types)
        self._values = dict(values)

    def row_value(self, name: str, batch: TokenBatch) -> Tensor:
        """See Signals; the batch's tokens are of the text, whatever their rows."""
        if name not in self._values:
            raise ValueError(
                f"feature {name} is not known of text that no engine runs; known are: {', '.join(self._values)}"
            )
        value_T = self._values[name][batch.positions_T]
        if bool((unknown_T := value_T.isnan()).any()):
            position = int(batch.positions_T[unknown_T][0])
            raise ValueError(f"feature {name} is not known for the token at position {position}")
        return value_T
