"""Static features: known before the forward, from ids, positions and the vocabulary alone.

Shape letters: T tokens in a step, V vocabulary.
"""

import math

import torch
from torch import Tensor

from tokenrouter.features.base import Column, Dependency, FeatureContext, FeatureFn, FeatureSpec
from tokenrouter.features.errors import NUM_ID_BUCKETS, id_buckets
from tokenrouter.features.token_types import NO_TOKEN, TokenType
from tokenrouter.types import TokenBatch


def position(batch: TokenBatch, context: FeatureContext) -> Column:
    """Position in the request, from 0."""
    return batch.positions_T


def position_in_prompt(batch: TokenBatch, context: FeatureContext) -> Column:
    """Position over the prompt's length: under 1 in the prompt, 1 and more behind it."""
    return batch.positions_T / batch.prompt_len_T


def position_in_turn(batch: TokenBatch, context: FeatureContext) -> Column:
    """Tokens since the last special token, such as a chat template's marker, or the start."""
    if bool((batch.turn_start_T < 0).any()):
        raise ValueError(
            "feature position_in_turn needs to know the special tokens: make the batch with "
            "sequence_batch(..., token_types=...)"
        )
    return batch.positions_T - batch.turn_start_T


def distance_to_prompt_end(batch: TokenBatch, context: FeatureContext) -> Column:
    """0 at the prompt's last token, positive before it, negative for generated tokens."""
    return batch.prompt_len_T - 1 - batch.positions_T


def is_decode(batch: TokenBatch, context: FeatureContext) -> Column:
    """The token's Phase: 0 in a prompt chunk, 1 when fed one at a time."""
    return batch.phase_T


def token_type(batch: TokenBatch, context: FeatureContext) -> Column:
    """The TokenType of the id."""
    return _look_up(context.types.types_V, batch.ids_T)


def previous_token_type(batch: TokenBatch, context: FeatureContext) -> Column:
    """The TokenType of the token before it in the request; at position 0 one more than the last."""
    return _look_up(context.types.types_or_none_V, batch.previous_T)


def previous_id(batch: TokenBatch, context: FeatureContext) -> Column:
    """The id before it in the request, -1 at position 0: a class to look up, not a quantity."""
    return batch.previous_T


def line_start(batch: TokenBatch, context: FeatureContext) -> Column:
    """1 for a capitalised word without a space before it, as after a newline or a quote."""
    return _look_up(context.types.line_start_V, batch.ids_T)


def log_frequency(batch: TokenBatch, context: FeatureContext) -> Column:
    """-ln(1 + id), a proxy: BPE gives ids in the order of merges, and Zipf makes 1/rank of it."""
    return _look_up(context.types.log_frequency_V, batch.ids_T)


def id_bucket(batch: TokenBatch, context: FeatureContext) -> Column:
    """The id, hashed into 256 buckets: a class to embed, not a quantity."""
    return id_buckets(batch.ids_T)


def repeats(batch: TokenBatch, context: FeatureContext) -> Column:
    """How often the same id came earlier in the request."""
    return batch.repeats_T


def repeats_log(batch: TokenBatch, context: FeatureContext) -> Column:
    """ln(1 + repeats)."""
    return torch.log1p(batch.repeats_T)


def _look_up(table_V: Tensor, ids_T: Tensor) -> Column:
    """By numpy: see ``FeatureSpec.compute``."""
    found_T: Column = table_V.numpy()[ids_T.numpy()]
    return found_T


def _spec(
    compute: FeatureFn,
    low: float,
    high: float,
    *depends_on: Dependency,
    is_class: bool = False,
    needs_text: bool = False,
) -> FeatureSpec:
    return FeatureSpec(
        name=compute.__name__,
        low=low,
        high=high,
        depends_on=frozenset(depends_on),
        is_class=is_class,
        needs_text=needs_text,
        compute=compute,
    )


SPECS = (
    _spec(position, 0, math.inf, "tokens"),
    _spec(position_in_prompt, 0, math.inf, "tokens", "prompt_length"),
    _spec(position_in_turn, 0, math.inf, "tokens", needs_text=True),
    _spec(distance_to_prompt_end, -math.inf, math.inf, "tokens", "prompt_length"),
    _spec(is_decode, 0, 1, "phase"),
    _spec(token_type, 0, max(TokenType), "tokens", is_class=True, needs_text=True),
    _spec(previous_token_type, 0, NO_TOKEN, "tokens", is_class=True, needs_text=True),
    _spec(previous_id, -1, math.inf, "tokens", is_class=True),
    _spec(line_start, 0, 1, "tokens", needs_text=True),
    _spec(log_frequency, -math.inf, 0, "tokens"),
    _spec(id_bucket, 0, NUM_ID_BUCKETS - 1, "tokens", is_class=True),
    _spec(repeats, 0, math.inf, "tokens"),
    _spec(repeats_log, 0, math.inf, "tokens"),
)
