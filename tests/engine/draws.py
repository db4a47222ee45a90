"""Completions as a sampler sees them, for its tests."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from tokenrouter import SamplingParams
from tokenrouter.engine.sampler import SampledTokens, Sampler
from tokenrouter.engine.sampling_rows import SamplerState, SamplingBatch


class Drawer:
    """One completion: its state, and how many tokens it has."""

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], *, index: int = 0
    ) -> None:
        self.state = SamplerState(params, prompt_ids, index=index)
        self.num_output = 0

    def advance(self, token_id: int) -> None:
        self.state.advance(token_id)
        self.num_output += 1


def sample(
    sampler: Sampler, logits_BV: Tensor, drawers: Sequence[Drawer], eos: frozenset[int]
) -> SampledTokens:
    """The next token of every completion; none advances."""
    batch = SamplingBatch(
        settings_B=np.array([one.state.settings for one in drawers]),
        num_output_B=np.array([one.num_output for one in drawers]),
        state_of=lambda b: drawers[b].state,
    )
    return sampler.sample(logits_BV, batch, eos)
