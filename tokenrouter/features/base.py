"""The contract of a feature.

A feature is one small function from the step's tokens, the vocabulary and, for some, what an engine
knows beside them, to one number per token, which a router sees as float32. It is causal: a token's
value depends on its own request up to and including that token, on the request's prompt length and
on the phase, never on the batch, the chunk or a later token. What depends on ``load`` or
``history`` says so.

Shape letters: T tokens in a step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from numpy.typing import NDArray
from torch import Tensor

from tokenrouter.features.signals import Signals
from tokenrouter.features.token_types import TokenTypeTable
from tokenrouter.types import Phase, TokenBatch

Dependency = Literal[
    "tokens", "prompt_length", "prompt", "phase", "logits", "history", "load", "random"
]
"""What a feature or a router's answer may depend on, beyond its options.

- ``tokens``: the request's ids up to this token; a draw hashed from them counts as tokens.
- ``prompt_length``: how long the request's prompt is.
- ``prompt``: all ids of the prompt, later ones too.
- ``phase``: prefill or decode.
- ``logits``: those of the previous token.
- ``history``: earlier decisions, measured errors or attention statistics.
- ``load``: the engine's queues and pool.
- ``random``: draws that are not hashed from the tokens.
"""

DecisionPoint = Literal["pre_forward", "after_layer_k"]
"""When a router is asked.

- ``pre_forward``: before the token's forward.
- ``after_layer_k``: when its first k layers, the same for every token, have run.
"""
DECISION_POINTS: tuple[DecisionPoint, ...] = get_args(DecisionPoint)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureContext:
    """What a feature may look at beside the tokens.

    Attributes:
        types: of the vocabulary, on the device of the batches.
        signals: of the engine that runs the tokens; None outside of one.
    """

    types: TokenTypeTable
    signals: Signals | None = None


Column = Tensor | NDArray[Any]
"""A number per token, [T]: an array, or a tensor on the CPU, of any dtype that numpy has."""
FeatureFn = Callable[[TokenBatch, FeatureContext], Column]


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSpec:
    """One feature: its name, where it exists, and the function that computes and describes it.

    Attributes:
        name: how a router asks for it.
        low, high: the range of its values, both ends included; infinite where it has no bound.
        phases: the phases in which it exists; it is refused elsewhere, never filled with zeros.
        decision_points: the decision points at which it exists.
        depends_on: what the value is computed from.
        is_class: values name things that are not near each other because their numbers are: never to be rounded.
        needs_text: it looks at the text of ids, so that a model without a tokenizer has none.
        needs_signals: it looks at what only a running engine knows.
        compute: ``TokenBatch``, ``FeatureContext`` -> ``Column``. A decode step waits for it, and the first operators
            after a forward are slow: numpy's cost a third of torch's, a look-up less than a formula.
    """

    name: str
    low: float
    high: float
    phases: frozenset[Phase] = frozenset(Phase)
    decision_points: frozenset[DecisionPoint] = frozenset(DECISION_POINTS)
    depends_on: frozenset[Dependency]
    is_class: bool = False
    needs_text: bool = False
    needs_signals: bool = False
    compute: FeatureFn
