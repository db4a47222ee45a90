"""What requests ask of the sampler, as rows of numbers, so that a step reads those of all its rows at once.

B rows of a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenrouter.engine.logits import FLOAT32_SAFE, FloatArray, IntArray, TokenCounts
from tokenrouter.features.draws import seed_key
from tokenrouter.sampling_params import SamplingParams

SETTINGS = np.dtype(
    [
        ("is_greedy", np.bool_),
        ("truncates", np.bool_),
        ("is_seeded", np.bool_),
        ("has_own_logits", np.bool_),
        ("min_tokens", np.int64),
        ("logprobs", np.int64),
        ("stream", np.uint64),
        ("inverse_temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
    ]
)
"""``has_own_logits``: a penalty or a bias changes its logits; ``logprobs``: -1 where none are asked for."""

_MOST = 2**62


class SamplerState:
    """What the sampler keeps of one completion. Survives preemption: nothing is recomputed.

    Args:
        params: as the user gave them.
        prompt_ids: tokens of the prompt; read only where a repetition penalty needs them.
        index: number of the completion, 0 .. n-1; its random stream is that of ``seed + index``.

    Attributes:
        settings: a SETTINGS record.
        counts: of the output's tokens, where a penalty needs them.
        bias: ids and what is added to their logits.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], *, index: int = 0
    ) -> None:
        self.params = params
        self.counts: TokenCounts | None = None
        if params.has_penalties:
            self.counts = TokenCounts(prompt_ids if params.repetition_penalty != 1 else ())
        self.bias: tuple[IntArray, FloatArray] | None = None
        if params.logit_bias:
            self.bias = (
                np.fromiter(params.logit_bias, np.int64),
                np.fromiter(params.logit_bias.values(), np.float32),
            )
        self.settings = self._settings(index)

    def advance(self, token_id: int) -> None:
        """Records a token of the output."""
        if self.counts is not None:
            self.counts.add(token_id)

    def _settings(self, index: int) -> np.void:
        params = self.params
        settings: np.void = np.zeros(1, SETTINGS)[0]
        settings["is_greedy"] = params.greedy
        settings["truncates"] = params.truncates
        settings["has_own_logits"] = self.counts is not None or self.bias is not None
        settings["min_tokens"] = min(params.min_tokens, _MOST)
        settings["logprobs"] = -1 if params.logprobs is None else params.logprobs
        if params.seed is not None and not params.greedy:
            settings["is_seeded"] = True
            settings["stream"] = seed_key((params.seed + index) % 2**63) % 2**64
        settings["inverse_temperature"] = 1 / min(
            max(params.temperature, 1 / FLOAT32_SAFE), FLOAT32_SAFE
        )
        settings["top_k"] = min(max(params.top_k, 0), _MOST)
        settings["top_p"], settings["min_p"] = params.top_p, params.min_p
        return settings


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The rows of a step that draw a token.

    Attributes:
        settings_B: SETTINGS.
        num_output_B: int64, tokens that each has generated so far.
        state_of: of a row; asked only where logits are changed.
    """

    settings_B: NDArray[np.void]
    num_output_B: IntArray
    state_of: Callable[[int], SamplerState]

    def __len__(self) -> int:
        return len(self.settings_B)
