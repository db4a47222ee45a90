"""Dynamic features: what only a running engine knows, of logits, attention, errors and load.

Shape letters: T tokens in a step.
"""

import math

from torch import Tensor

from tokenrouter.features.base import Dependency, FeatureContext, FeatureFn, FeatureSpec
from tokenrouter.features.signals import Signals
from tokenrouter.types import Phase, TokenBatch


def entropy(batch: TokenBatch, context: FeatureContext) -> Tensor:
    """Entropy, in nats, of the distribution that the token was drawn from (at temperature 1)."""
    return _of_row("entropy", batch, context)


def margin(batch: TokenBatch, context: FeatureContext) -> Tensor:
    """Probability of the likeliest token less that of the second, in the same distribution."""
    return _of_row("margin", batch, context)


def top1(batch: TokenBatch, context: FeatureContext) -> Tensor:
    """Probability of the likeliest token in the same distribution."""
    return _of_row("top1", batch, context)


def surprise(batch: TokenBatch, context: FeatureContext) -> Tensor:
    """-log p, in nats, of the token itself in the same distribution; also of a forced token."""
    return _of_row("surprise", batch, context)


def received(batch: TokenBatch, context: FeatureContext) -> Tensor:
    """Share of the previous token's attention that went to the 16 newest entries."""
    return _of_row("received", batch, context)


def received_decayed(batch: TokenBatch, context: FeatureContext) -> Tensor:
    """``received``, averaged over the request's queries since its prompt's end, decay 0.9 each."""
    return _of_row("received_decayed", batch, context)


def sink_share(batch: TokenBatch, context: FeatureContext) -> Tensor:
    """Share of the previous token's attention that went to the request's first 4 entries."""
    return _of_row("sink_share", batch, context)


def last_row_entropy(batch: TokenBatch, context: FeatureContext) -> Tensor:
    """Entropy, in nats, of the previous token's attention, mean over heads and layers."""
    return _of_row("last_row_entropy", batch, context)


def error_history(batch: TokenBatch, context: FeatureContext) -> Tensor:
    """Mean measured error of earlier low-path tokens of the same type and id bucket."""
    return _signals("error_history", context).mean_error(batch)


def queue_depth(batch: TokenBatch, context: FeatureContext) -> Tensor:
    """How many requests wait as the step begins."""
    return _load("queue_depth", batch, context)


def pool_use(batch: TokenBatch, context: FeatureContext) -> Tensor:
    """Share of the KV slots that no request could get as the step begins."""
    return _load("pool_use", batch, context)


def _of_row(name: str, batch: TokenBatch, context: FeatureContext) -> Tensor:
    return _signals(name, context).row_value(name, batch)


def _load(name: str, batch: TokenBatch, context: FeatureContext) -> Tensor:
    return _signals(name, context).load(name, batch)


def _signals(name: str, context: FeatureContext) -> Signals:
    if context.signals is None:
        raise ValueError(
            f"feature {name} is known only while an engine runs the tokens: run them through "
            "LLM.generate or LLM.score, or leave the feature out"
        )
    return context.signals


def _decode(compute: FeatureFn, low: float, high: float, depends_on: Dependency) -> FeatureSpec:
    return FeatureSpec(
        name=compute.__name__,
        low=low,
        high=high,
        phases=frozenset({Phase.DECODE}),
        depends_on=frozenset({"tokens", depends_on}),
        needs_signals=True,
        compute=compute,
    )


SPECS = (
    _decode(entropy, 0, math.inf, "logits"),
    _decode(margin, 0, 1, "logits"),
    _decode(top1, 0, 1, "logits"),
    _decode(surprise, 0, math.inf, "logits"),
    _decode(received, 0, 1, "history"),
    _decode(received_decayed, 0, 1, "history"),
    _decode(sink_share, 0, 1, "history"),
    _decode(last_row_entropy, 0, math.inf, "history"),
    FeatureSpec(
        name="error_history",
        low=0,
        high=math.inf,
        depends_on=frozenset({"tokens", "history"}),
        needs_text=True,
        needs_signals=True,
        compute=error_history,
    ),
    FeatureSpec(
        name="queue_depth",
        low=0,
        high=math.inf,
        depends_on=frozenset({"load"}),
        needs_signals=True,
        compute=queue_depth,
    ),
    FeatureSpec(
        name="pool_use",
        low=0,
        high=1,
        depends_on=frozenset({"load"}),
        needs_signals=True,
        compute=pool_use,
    ),
)
