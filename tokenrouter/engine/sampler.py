"""From logits to tokens: one sampler per engine, one state per completion, and when to stop.

B requests of a step, P rows to process, R rows to draw at random, V vocabulary, K leading
candidates of a row.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenrouter.engine.logits import (
    FloatArray,
    IntArray,
    TokenCounts,
    add_bias_,
    candidates,
    mask_tokens_,
    penalise_,
    requested_logprobs,
    scale_,
)
from tokenrouter.kernels import KernelSet, ReferenceKernels
from tokenrouter.outputs import Logprob
from tokenrouter.sampling_params import SamplingParams

_FIRST_WIDTH = 256
"""Candidates first looked at for a cut; where it lies further on, ``_WIDER`` times more."""
_WIDER = 16


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
    def plain_greedy(self) -> bool:
        """Whether the next token is the largest of the model's own logits."""
        return (
            self.params.greedy
            and self.counts is None
            and self.bias is None
            and self.num_output >= self.params.min_tokens
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

    Random rows take ``argmax(p / e)`` with ``e`` exponential, which is a draw from ``p`` (the
    Gumbel-max trick). So two runs with equal seeds and nearly equal logits draw mostly equal
    tokens, which keeps a comparison of routers close.

    Args:
        vocab_size: V, columns of the logits.
        seed: start of the stream that all requests without an own seed share.
        kernels: the backend that finds greedy tokens; None: the reference.
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
        processed = [row for row, state in enumerate(states) if not state.plain_greedy]
        if not processed:
            ids_B = self._largest(logits_BV, range(len(states)))
        else:
            ids_B = torch.empty(len(states), dtype=torch.int64, device=logits_BV.device)
            if plain := [row for row, state in enumerate(states) if state.plain_greedy]:
                ids_B[plain] = self._largest(logits_BV[plain], plain)
            processed.sort(key=lambda row: _kind(states[row]))
            logits_PV = logits_BV[processed].to(torch.float32)
            chosen = [states[row] for row in processed]
            ids_B[processed] = self._sample_processed(logits_PV, chosen, processed, eos_token_ids)
        wanted = [state.params.logprobs for state in states]
        return SampledTokens(ids_B, requested_logprobs(logits_BV, ids_B, wanted))

    def _largest(self, logits_PV: Tensor, rows: Sequence[int]) -> Tensor:
        """Ids of the largest logits, of equals the lowest id."""
        best_P, ids_P = self._kernels.row_max(logits_PV)
        if not all(map(math.isfinite, best_P.tolist())):
            _require(best_P.isfinite(), rows)
        return ids_P

    def _sample_processed(
        self,
        logits_PV: Tensor,
        states: Sequence[SamplerState],
        rows: Sequence[int],
        eos_token_ids: frozenset[int],
    ) -> Tensor:
        """Ids of rows that are ordered by ``_kind``; ``logits_PV`` is ours to change."""
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
        random = sum(state.params.greedy for state in states)
        cut = random + sum(not s.params.greedy and not s.params.truncates for s in states)
        ids: list[Tensor] = []
        if random > 0:
            ids.append(self._largest(logits_PV[:random], rows[:random]))
        if random < len(states):
            params = [state.params for state in states[random:]]
            scale_(logits_PV[random:], [p.temperature for p in params], [p.min_p for p in params])
        if random < cut:
            part = slice(random, cut)
            ids.append(self._draw(logits_PV[part], None, states[part], rows[part]))
        if cut < len(states):
            ids.append(self._draw_cut(logits_PV[cut:], states[cut:], rows[cut:]))
        return torch.cat(ids)

    def _draw_cut(
        self, scaled_RV: Tensor, states: Sequence[SamplerState], rows: Sequence[int]
    ) -> Tensor:
        """One draw per row with top_k, top_p or min_p, from as many candidates as it takes."""
        result_R = torch.empty(len(states), dtype=torch.int64, device=scaled_RV.device)
        pending, width = list(range(len(states))), _FIRST_WIDTH
        while pending:
            rest_RV = scaled_RV if len(pending) == len(states) else scaled_RV[pending]
            found = candidates(rest_RV, [states[r].params for r in pending], width)
            complete = found.complete_R.tolist()
            done = [i for i, is_complete in enumerate(complete) if is_complete]
            if done:
                drawn = [pending[i] for i in done]
                result_R[drawn] = self._draw(
                    found.scaled_RK[done],
                    found.ids_RK[done],
                    [states[r] for r in drawn],
                    [rows[r] for r in drawn],
                )
            pending = [
                r for r, is_complete in zip(pending, complete, strict=True) if not is_complete
            ]
            width *= _WIDER
        return result_R

    def _draw(
        self,
        scaled_RK: Tensor,
        ids_RK: Tensor | None,
        states: Sequence[SamplerState],
        rows: Sequence[int],
    ) -> Tensor:
        """One draw per row, from the candidates ``ids_RK`` (None: all ids). Consumes the input.

        A seeded row draws noise for all V, so that its tokens never depend on K.
        """
        noise_RK = torch.empty_like(scaled_RK)
        num_shared = sum(state.generator is None for state in states)
        noise_RK[:num_shared].uniform_(generator=self._generator)
        for row, state in enumerate(states[num_shared:], start=num_shared):
            noise_V = torch.rand(
                self.vocab_size, generator=state.generator, device=scaled_RK.device
            )
            noise_RK[row] = noise_V if ids_RK is None else noise_V[ids_RK[row]]
        # torch's exponential_ is six times slower on CPU. The clamp keeps -log(u) in (0, inf).
        noise_RK.clamp_(1e-10, 1 - 2**-24).log_().neg_()
        best_R, choice_R = scaled_RK.exp_().div_(noise_RK).max(dim=-1)
        _require(best_R > 0, rows)
        if ids_RK is None:
            return choice_R
        return ids_RK.gather(1, choice_R.unsqueeze(1)).squeeze(1)


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


def _kind(state: SamplerState) -> tuple[bool, bool, bool]:
    """Sort key: greedy rows, then rows drawn from all tokens, then cut ones; seeded rows last."""
    params = state.params
    return not params.greedy, params.truncates, state.generator is not None


def _require(valid_P: Tensor, rows: Sequence[int]) -> None:
    if not bool(valid_P.all()):
        bad = [rows[p] for p in (~valid_P).nonzero().flatten().tolist()]
        raise RuntimeError(
            f"no token can be sampled in row {', '.join(map(str, bad))} of the batch: the logits "
            "hold NaN or infinity, or logit_bias and min_tokens leave no token"
        )
