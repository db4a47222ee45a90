"""Features of the hidden state after the first layers, which every token of a forward runs high.

They are a function of the request's ids and the weights. What low precision costs a token is decided by how far its
largest channels stand out, as these set the scale of all others.

Shape letters: T tokens in a step, E hidden size.
"""

import math

from torch import Tensor

from tokenrouter.features.base import FeatureContext, FeatureFn, FeatureSpec
from tokenrouter.types import TokenBatch

_TINY = 1e-12


def hidden_rms(batch: TokenBatch, context: FeatureContext) -> Tensor:
    """Root mean square of the hidden state's channels."""
    del context
    return _mean_square(_hidden("hidden_rms", batch)).sqrt()


def hidden_crest(batch: TokenBatch, context: FeatureContext) -> Tensor:
    """Largest magnitude of a channel of the hidden state over its root mean square."""
    del context
    hidden_TE = _hidden("hidden_crest", batch)
    return hidden_TE.abs().amax(-1) / _mean_square(hidden_TE).clamp_min(_TINY).sqrt()


def hidden_kurtosis(batch: TokenBatch, context: FeatureContext) -> Tensor:
    """Mean fourth power of the hidden state's channels over the square of their mean square."""
    del context
    hidden_TE = _hidden("hidden_kurtosis", batch)
    return hidden_TE.pow(4).mean(-1) / _mean_square(hidden_TE).clamp_min(_TINY).square()


def _hidden(name: str, batch: TokenBatch) -> Tensor:
    if batch.hidden_TE is None:
        raise ValueError(
            f"feature {name} is known only while an engine runs the tokens, after their first layers: run them "
            "through LLM.generate or LLM.score, or leave the feature out"
        )
    return batch.hidden_TE.float()


def _mean_square(hidden_TE: Tensor) -> Tensor:
    return hidden_TE.square().mean(-1)


def _spec(compute: FeatureFn) -> FeatureSpec:
    return FeatureSpec(
        name=compute.__name__,
        low=0,
        high=math.inf,
        decision_points=frozenset({"after_layer_k"}),
        depends_on=frozenset({"tokens"}),
        needs_signals=True,
        compute=compute,
    )


SPECS = tuple(map(_spec, (hidden_rms, hidden_crest, hidden_kurtosis)))
