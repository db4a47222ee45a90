"""From a step's tokens to what a router sees.

Shape letters: T tokens in a step, F features, P those of them for which a feature exists.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenrouter.features.base import FeatureContext, FeatureSpec
from tokenrouter.features.registry import feature_specs
from tokenrouter.features.signals import Signals
from tokenrouter.features.token_types import TokenTypeTable
from tokenrouter.types import Phase, RouteInput, TokenBatch

_BOTH = frozenset(Phase)


class FeatureExtractor:
    """Computes the features that a router declared, in one vectorised pass over a step's tokens.

    Args:
        names: the router's ``features``; may be empty.
        token_types: the vocabulary's types, on the device of the batches.
        signals: of the engine that runs the tokens; None: features that need them are refused.
        optional: names of those that are NaN for tokens of a phase in which they do not exist; others are refused
            there.

    Raises:
        ValueError: a name that does not exist (the message lists those that do), or one name twice.
    """

    def __init__(
        self,
        names: Sequence[str],
        token_types: TokenTypeTable,
        signals: Signals | None = None,
        optional: Collection[str] = (),
    ) -> None:
        self.names = tuple(names)
        self.specs = feature_specs(self.names)
        self.token_types = token_types
        self._context = FeatureContext(types=token_types, signals=signals)
        self._absent = [
            (spec, phase)
            for spec in self.specs
            for phase in Phase
            if phase not in spec.phases and spec.name not in optional
        ]

    def extract(self, batch: TokenBatch) -> RouteInput:
        """The router's view of ``batch``; the columns of ``values_TF`` are contiguous in memory.

        Raises:
            ValueError: ``batch`` holds tokens of a phase in which a feature does not exist, or of
                which it is not known.
        """
        for spec, phase in self._absent:
            if (batch.phase_T == phase).any():
                raise ValueError(
                    f"feature {spec.name} does not exist for {phase.name.lower()} tokens: "
                    "give only tokens of the phases that the router decides"
                )
        values_FT = np.empty((len(self.specs), len(batch)), np.float32)
        for row_T, spec in zip(values_FT, self.specs, strict=True):
            row_T[:] = self._column(spec, batch)
        values_TF = torch.from_numpy(values_FT).t()
        return RouteInput(
            values_TF=values_TF,
            names=self.names,
            ids_T=batch.ids_T,
            positions_T=batch.positions_T,
            row_T=batch.row_T,
            phase_T=batch.phase_T,
            prefix_hash_T=batch.prefix_hash_T,
        )

    def _column(self, spec: FeatureSpec, batch: TokenBatch) -> NDArray[Any]:
        """A feature of each token, NaN where it does not exist."""
        if spec.phases == _BOTH:
            return self._compute(spec, batch)
        exists_T = np.isin(batch.phase_T.numpy(), list(spec.phases))
        if exists_T.all():
            return self._compute(spec, batch)
        column_T = np.full(exists_T.shape, np.nan, np.float32)
        if exists_T.any():
            index_P = torch.from_numpy(np.flatnonzero(exists_T))
            column_T[exists_T] = self._compute(spec, batch.select(index_P))
        return column_T

    def _compute(self, spec: FeatureSpec, batch: TokenBatch) -> NDArray[Any]:
        column_T = spec.compute(batch, self._context)
        return column_T.numpy() if isinstance(column_T, Tensor) else column_T
