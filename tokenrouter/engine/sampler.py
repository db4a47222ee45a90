"""From logits to tokens: one sampler per engine, and when to stop.

B requests of a step, P rows to process, R rows to draw at random, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenrouter.engine.logits import add_bias_, mask_tokens_, penalise_, requested_logprobs
from tokenrouter.engine.sampling_rows import SamplerState, SamplingBatch
from tokenrouter.features.draws import uniform_draws
from tokenrouter.kernels import Cut, KernelSet, ReferenceKernels
from tokenrouter.outputs import Logprob
from tokenrouter.sampling_params import SamplingParams


class SampledTokens(NamedTuple):
    """One token per row.

    Attributes:
        ids_B: int64, on the device of the logits.
        logprobs: per row what ``top_logprobs`` gives, None where none were asked for, or by no row.
    """

    ids_B: Tensor
    logprobs: list[dict[int, Logprob] | None] | None


class Sampler:
    """Draws one token per row. Holds nothing of any request, only the unseeded random stream.

    A random row takes one uniform number, that of its place in its own stream where it is seeded, and the token at
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
        self, logits_BV: Tensor, batch: SamplingBatch, eos_token_ids: frozenset[int]
    ) -> SampledTokens:
        """The next token of every row.

        Args:
            logits_BV: any float dtype; not modified.
            batch: one row per row.
            eos_token_ids: masked, like a request's stop ids, before its ``min_tokens``.

        Raises:
            RuntimeError: a row holds NaN, or nothing that may be chosen.
        """
        if logits_BV.shape != (len(batch), self.vocab_size):
            raise ValueError(
                f"logits must be [{len(batch)}, {self.vocab_size}], got {list(logits_BV.shape)}"
            )
        settings_B, uniform_B = batch.settings_B, self._uniform(batch, logits_BV.device)
        is_young_B = batch.num_output_B < settings_B["min_tokens"]
        is_plain_B = ~(settings_B["has_own_logits"] | is_young_B)
        if is_plain_B.all():
            ids_B = self._choose(logits_BV, settings_B, uniform_B)
        else:
            ids_B = torch.empty(len(batch), dtype=torch.int64, device=logits_BV.device)
            plain, rest = np.flatnonzero(is_plain_B), np.flatnonzero(~is_plain_B)
            if len(plain):
                ids_B[plain] = self._choose(logits_BV[plain], settings_B[plain], uniform_B[plain])
            logits_PV = logits_BV[rest].to(torch.float32)
            states = [batch.state_of(row) for row in rest.tolist()]
            _process_(logits_PV, states, is_young_B[rest], eos_token_ids)
            ids_B[rest] = self._choose(logits_PV, settings_B[rest], uniform_B[rest])
        if len(broken := np.flatnonzero(ids_B.cpu().numpy() < 0)):
            raise RuntimeError(
                f"no token can be sampled in row {', '.join(map(str, broken.tolist()))} of the batch: "
                "the logits hold NaN or infinity, or logit_bias and min_tokens leave no token"
            )
        wanted_B = settings_B["logprobs"]
        if wanted_B.max(initial=-1) < 0:
            return SampledTokens(ids_B, None)
        return SampledTokens(ids_B, requested_logprobs(logits_BV, ids_B, wanted_B))

    def _uniform(self, batch: SamplingBatch, device: torch.device) -> Tensor:
        """Float64 [B] in [0, 1): one number of its stream per random row, 0 for greedy rows."""
        is_greedy_B, is_seeded_B = batch.settings_B["is_greedy"], batch.settings_B["is_seeded"]
        if is_greedy_B.all():
            return torch.zeros(len(batch), dtype=torch.float64, device=device)
        shared, own = np.flatnonzero(~(is_greedy_B | is_seeded_B)), np.flatnonzero(is_seeded_B)
        shared_N = torch.rand(
            len(shared), generator=self._generator, dtype=torch.float64, device=device
        )
        if len(shared) == len(batch):
            return shared_N
        uniform_B = torch.zeros(len(batch), dtype=torch.float64, device=device)
        uniform_B[shared] = shared_N
        streams_N = batch.settings_B["stream"][own]
        uniform_B[own] = torch.from_numpy(uniform_draws(streams_N, batch.num_output_B[own])).to(
            device
        )
        return uniform_B

    def _choose(self, logits_PV: Tensor, settings_P: NDArray[np.void], uniform_P: Tensor) -> Tensor:
        """Ids of rows whose logits are as they should be, -1 where there is none to choose."""
        is_greedy_P, truncates_P = settings_P["is_greedy"], settings_P["truncates"]
        ids_P = torch.empty(0)
        for choose, is_chosen_P in (
            (self._largest, is_greedy_P),
            (self._draw_cut, truncates_P),
            (self._draw, ~(is_greedy_P | truncates_P)),
        ):
            if is_chosen_P.all():
                return choose(logits_PV, settings_P, uniform_P)
            if is_chosen_P.any():
                of = np.flatnonzero(is_chosen_P)
                ids_R = choose(logits_PV[of], settings_P[of], uniform_P[of])
                ids_P = ids_P if len(ids_P) else ids_R.new_empty(len(settings_P))
                ids_P[of] = ids_R
        return ids_P

    def _largest(self, logits_RV: Tensor, settings_R: NDArray[np.void], _: Tensor) -> Tensor:
        """Ids of the largest logits, of equals the lowest id."""
        best_R, ids_R = self._kernels.row_max(logits_RV)
        if math.isfinite(best_R.sum()):
            return ids_R
        return ids_R.where(best_R.isfinite(), -1)

    def _draw(self, logits_RV: Tensor, settings_R: NDArray[np.void], uniform_R: Tensor) -> Tensor:
        """One draw per row from all ids."""
        inverse_R = _column(settings_R, "inverse_temperature", logits_RV.device)
        return self._kernels.draw(logits_RV, inverse_R, uniform_R)

    def _draw_cut(
        self, logits_RV: Tensor, settings_R: NDArray[np.void], uniform_R: Tensor
    ) -> Tensor:
        """One draw per row from what top_k, top_p and min_p leave."""
        device = logits_RV.device
        cut = Cut(
            _column(settings_R, "top_k", device).clamp(max=self.vocab_size),
            _column(settings_R, "top_p", device),
            _column(settings_R, "min_p", device),
        )
        inverse_R = _column(settings_R, "inverse_temperature", device)
        return self._kernels.draw_cut(logits_RV, inverse_R, uniform_R, cut)


def _column(settings_R: NDArray[np.void], name: str, device: torch.device) -> Tensor:
    return torch.from_numpy(settings_R[name].copy()).to(device)


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
    token_id: int,
    num_output: int,
    eos_token_ids: frozenset[int],
    room: int,
) -> tuple[Literal["stop", "length"], int | None] | None:
    """Whether a token ends the output. Stop strings are the detokenizer's to find.

    Args:
        params: of the request.
        token_id: the last one.
        num_output: tokens generated so far, the last one included.
        eos_token_ids: of the model.
        room: output tokens that the model's length has room for after the prompt.

    Returns:
        None to go on, else (finish_reason, stop_reason); stop_reason is the id for a stop id, None
        for EOS and length.
    """
    if ends_output(params, token_id, num_output, eos_token_ids):
        is_eos = token_id in eos_token_ids and not params.ignore_eos
        return "stop", None if is_eos else token_id
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    return ("length", None) if num_output >= limit else None


def _process_(
    logits_PV: Tensor,
    states: Sequence[SamplerState],
    is_young_P: NDArray[np.bool_],
    eos_token_ids: frozenset[int],
) -> None:
    """Bias, mask and penalties, in place."""
    add_bias_(logits_PV, [(p, *s.bias) for p, s in enumerate(states) if s.bias is not None])
    mask_tokens_(
        logits_PV,
        [
            (p, eos_token_ids.union(states[p].params.stop_ids))
            for p in np.flatnonzero(is_young_P).tolist()
        ],
    )
    penalise_(
        logits_PV,
        [(p, s.params, s.counts) for p, s in enumerate(states) if s.counts is not None],
    )
