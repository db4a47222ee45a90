"""From a step's tokens to what a router sees.

Shape letters: T tokens in a step, F features.
"""

from collections.abc import Sequence

import torch

from tokenrouter.features.base import FeatureContext
from tokenrouter.features.registry import feature_specs
from tokenrouter.features.signals import Signals
from tokenrouter.features.token_types import TokenTypeTable
from tokenrouter.types import Phase, RouteInput, TokenBatch


class FeatureExtractor:
    """Computes the features that a router declared, in one vectorised pass over a step's tokens.

    Args:
        names: the router's ``features``; may be empty.
        token_types: the vocabulary's types, on the device of the batches.
        signals: of the engine that runs the tokens; None: features that need them are refused.

    Raises:
        ValueError: a name that does not exist (the message lists those that do), or one name twice.
    """

    def __init__(
        self,
        names: Sequence[str],
        token_types: TokenTypeTable,
        signals: Signals | None = None,
    ) -> None:
        self.names = tuple(names)
        self.specs = feature_specs(self.names)
        self.token_types = token_types
        self._context = FeatureContext(types=token_types, signals=signals)
        self._absent = [(spec, p) for spec in self.specs for p in Phase if p not in spec.phases]

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
        if self.specs:
            columns = [spec.compute(batch, self._context) for spec in self.specs]
            values_TF = torch.stack(columns).t()
        else:
            values_TF = torch.empty(len(batch), 0, device=batch.ids_T.device)
        return RouteInput(
            values_TF=values_TF,
            names=self.names,
            ids_T=batch.ids_T,
            positions_T=batch.positions_T,
            row_T=batch.row_T,
            phase_T=batch.phase_T,
            prefix_hash_T=batch.prefix_hash_T,
        )
