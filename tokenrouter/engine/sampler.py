"""From logits to tokens: one sampler per engine, one state per completion, and when to stop.

B requests of a step, P rows to process, R rows to draw at random, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenrouter.engine.logits import (
    FLOAT32_SAFE,
    FloatArray,
    IntArray,
    TokenCounts,
    add_bias_,
    mask_tokens_,
    penalise_,
    requested_logprobs,
)
from tokenrouter.kernels import Cut, KernelSet, ReferenceKernels
from tokenrouter.outputs import Logprob
from tokenrouter.sampling_params import SamplingParams

_Choose = Callable[[Tensor, Sequence[SamplingParams], Tensor], Tensor]
"""From logits [R, V], parameters and uniform numbers [R] to ids [R], -1 where there is none."""


class SamplerState:
    """What the sampler remembers of one completion. Survives preemption: nothing is recomputed.

    Args:
        params: as the user gave them.
        prompt_ids: tokens of the prompt; read only where a repetition penalty needs them.
        device: where the logits of this completion are, and its random stream.
        index: number of the completion, 0 .. n-1; its stream starts from ``seed + index``.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        index: int = 0,
    ) -> None:
        self.params = params
        self.num_output = 0
        self.generator: torch.Generator | None = None
        if params.seed is not None and not params.greedy:
            self.generator = torch.Generator(device).manual_seed((params.seed + index) % 2**63)
        self.counts: TokenCounts | None = None
        if params.has_penalties:
            self.counts = TokenCounts(prompt_ids if params.repetition_penalty != 1 else ())
        self.bias: tuple[IntArray, FloatArray] | None = None
        if params.logit_bias:
            self.bias = (
                np.fromiter(params.logit_bias, np.int64),
                np.fromiter(params.logit_bias.values(), np.float32),
            )

    @property
    def plain(self) -> bool:
        """Whether the next token comes from the model's own logits."""
        return (
            self.counts is None and self.bias is None and self.num_output >= self.params.min_tokens
        )

    def advance(self, token_id: int) -> None:
        """Records a token of the output, sampled or forced."""
        self.num_output += 1
        if self.counts is not None:
            self.counts.add(token_id)


class SampledTokens(NamedTuple):
    """One token per row.

    Attributes:
        ids_B: int64, on the device of the logits.
        logprobs: per row what ``top_logprobs`` gives, None where none were asked for.
    """

    ids_B: Tensor
    logprobs: list[dict[int, Logprob] | None]


class Sampler:
    """Draws one token per row. Holds nothing of any request, only the unseeded random stream.

    A random row takes one uniform number, from its own stream where it is seeded, and the token at
    that share of the row's probability: tokens in the order of their ids, those that top_k, top_p
    or min_p leave in the order of their probability.

    Equal seeds give equal tokens for equal logits. Where logits differ a little, as between two
    routers, shares move and other tokens are drawn: compare those by greedy or forced tokens.

    Args:
        vocab_size: V, columns of the logits.
        seed: start of the stream that all requests without an own seed share.
        kernels: the backend that finds greedy tokens and draws random ones; None: the reference.
        device: where the logits are.
    """

    def __init__(
        self,
        vocab_size: int,
        seed: int,
        kernels: KernelSet | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.vocab_size = vocab_size
        self._kernels = kernels or ReferenceKernels()
        self._generator = torch.Generator(device).manual_seed(seed)

    def sample(
        self, logits_BV: Tensor, states: Sequence[SamplerState], eos_token_ids: frozenset[int]
    ) -> SampledTokens:
        """The next token of every row. The caller advances the states.

        Args:
            logits_BV: any float dtype; not modified.
            states: one per row.
            eos_token_ids: masked, like a request's stop ids, before its ``min_tokens``.

        Raises:
            RuntimeError: a row holds NaN, or nothing that may be chosen.
        """
        if logits_BV.shape != (len(states), self.vocab_size):
            raise ValueError(
                f"logits must be [{len(states)}, {self.vocab_size}], got {list(logits_BV.shape)}"
            )
        uniform_B = self._uniform(states, logits_BV.device)
        plain = [row for row, state in enumerate(states) if state.plain]
        if len(plain) == len(states):
            ids_B = self._choose(logits_BV, states, uniform_B)
        else:
            ids_B = torch.empty(len(states), dtype=torch.int64, device=logits_BV.device)
            if plain:
                chosen = [states[row] for row in plain]
                ids_B[plain] = self._choose(logits_BV[plain], chosen, uniform_B[plain])
            rest = [row for row, state in enumerate(states) if not state.plain]
            chosen = [states[row] for row in rest]
            logits_PV = _processed(logits_BV[rest].to(torch.float32), chosen, eos_token_ids)
            ids_B[rest] = self._choose(logits_PV, chosen, uniform_B[rest])
        if broken := [row for row, token_id in enumerate(ids_B.tolist()) if token_id < 0]:
            raise RuntimeError(
                f"no token can be sampled in row {', '.join(map(str, broken))} of the batch: the "
                "logits hold NaN or infinity, or logit_bias and min_tokens leave no token"
            )
        wanted = [state.params.logprobs for state in states]
        return SampledTokens(ids_B, requested_logprobs(logits_BV, ids_B, wanted))

    def _uniform(self, states: Sequence[SamplerState], device: torch.device) -> Tensor:
        """Float64 [B] in [0, 1): one number of its stream per random row, 0 for greedy rows."""
        uniform_B = torch.zeros(len(states), dtype=torch.float64, device=device)
        shared = [
            row for row, s in enumerate(states) if not s.params.greedy and s.generator is None
        ]
        if shared:
            uniform_B[shared] = torch.rand(
                len(shared), generator=self._generator, dtype=torch.float64, device=device
            )
        for row, state in enumerate(states):
            if state.generator is not None:
                uniform_B[row].uniform_(generator=state.generator)
        return uniform_B

    def _choose(
        self, logits_PV: Tensor, states: Sequence[SamplerState], uniform_P: Tensor
    ) -> Tensor:
        """Ids of rows whose logits are as they should be, -1 where there is none to choose."""
        groups: dict[_Choose, list[int]] = {}
        for p, state in enumerate(states):
            choose: _Choose = self._draw_cut if state.params.truncates else self._draw
            groups.setdefault(self._largest if state.params.greedy else choose, []).append(p)
        if len(groups) == 1:
            return next(iter(groups))(logits_PV, [s.params for s in states], uniform_P)
        ids_P = torch.empty(len(states), dtype=torch.int64, device=logits_PV.device)
        for choose_group, group in groups.items():
            params = [states[p].params for p in group]
            ids_P[group] = choose_group(logits_PV[group], params, uniform_P[group])
        return ids_P

    def _largest(self, logits_RV: Tensor, params: Sequence[SamplingParams], _: Tensor) -> Tensor:
        """Ids of the largest logits, of equals the lowest id."""
        best_R, ids_R = self._kernels.row_max(logits_RV)
        if all(map(math.isfinite, best_R.tolist())):
            return ids_R
        return ids_R.where(best_R.isfinite(), -1)

    def _draw(
        self, logits_RV: Tensor, params: Sequence[SamplingParams], uniform_R: Tensor
    ) -> Tensor:
        """One draw per row from all ids."""
        return self._kernels.draw(logits_RV, _inverse_temperature(params, logits_RV), uniform_R)

    def _draw_cut(
        self, logits_RV: Tensor, params: Sequence[SamplingParams], uniform_R: Tensor
    ) -> Tensor:
        """One draw per row from what top_k, top_p and min_p leave."""
        device = logits_RV.device
        cut = Cut(
            torch.tensor([min(max(p.top_k, 0), self.vocab_size) for p in params], device=device),
            torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
            torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device),
        )
        inverse_R = _inverse_temperature(params, logits_RV)
        return self._kernels.draw_cut(logits_RV, inverse_R, uniform_R, cut)


def _inverse_temperature(params: Sequence[SamplingParams], logits_RV: Tensor) -> Tensor:
    """Float32 [R], on the device of the logits."""
    return torch.tensor(
        [1 / min(p.temperature, FLOAT32_SAFE) for p in params], device=logits_RV.device
    )


def ends_output(
    params: SamplingParams, token_id: int, num_output: int, eos_token_ids: frozenset[int]
) -> bool:
    """Whether the ``num_output``-th token (from 1) is an EOS or stop id that ends the output."""
    if num_output < params.min_tokens:
        return False
    is_eos = token_id in eos_token_ids and not params.ignore_eos
    return is_eos or token_id in params.stop_ids


def check_stop(
    params: SamplingParams,
    output_ids: Sequence[int],
    eos_token_ids: frozenset[int],
    max_total: int,
) -> tuple[Literal["stop", "length"], int | None] | None:
    """Whether the last token ends the output. Stop strings are the detokenizer's to find.

    Args:
        params: of the request.
        output_ids: tokens generated so far, the last one included; at least one.
        eos_token_ids: of the model.
        max_total: output tokens that the model's length has room for after the prompt.

    Returns:
        None to go on, else (finish_reason, stop_reason); stop_reason is the id for a stop id, None
        for EOS and length.
    """
    last = output_ids[-1]
    if ends_output(params, last, len(output_ids), eos_token_ids):
        is_eos = last in eos_token_ids and not params.ignore_eos
        return "stop", None if is_eos else last
    limit = max_total if params.max_tokens is None else min(max_total, params.max_tokens)
    return ("length", None) if len(output_ids) >= limit else None


def _processed(
    logits_PV: Tensor, states: Sequence[SamplerState], eos_token_ids: frozenset[int]
) -> Tensor:
    """Bias, mask and penalties, in place."""
    add_bias_(logits_PV, [(p, *s.bias) for p, s in enumerate(states) if s.bias is not None])
    mask_tokens_(
        logits_PV,
        [
            (p, eos_token_ids.union(s.params.stop_ids))
            for p, s in enumerate(states)
            if s.num_output < s.params.min_tokens
        ],
    )
    penalise_(
        logits_PV,
        [(p, s.params, s.counts) for p, s in enumerate(states) if s.counts is not None],
    )
    return logits_PV
