"""Which of a step's tokens a router is asked about, and which tokens of prompts it hears of ahead.

T tokens of a step, N those of them that are decided in it, C chunks, A tokens ahead.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from tokenrouter.engine.step import IntArray, PackedStep, ranges, token_batch
from tokenrouter.routers.base import Router
from tokenrouter.scheduler import UNDECIDED
from tokenrouter.types import Phase, RoutingDecision, TokenBatch

REPEATED = "repeats the decision before it"


def repeating(
    step: PackedStep, fresh_T: NDArray[np.bool_], router: Router
) -> NDArray[np.bool_] | None:
    """Those of ``fresh_T`` that repeat the decision at the last multiple of ``router.decides_every``; None: no token.

    Not where the multiple, or the token itself, is of a phase that the router does not decide.
    """
    if router.decides_every == 1:
        return None
    batch = step.batch
    positions_T = batch.positions_T.numpy()
    decider_T = _decider(step, router)
    repeats_T: NDArray[np.bool_] = fresh_T & (decider_T != positions_T)
    if router.phases < set(Phase):
        phases = list(router.phases)
        in_prompt_T = decider_T < batch.prompt_len_T.numpy()
        decider_phase_T = np.where(in_prompt_T, int(Phase.PREFILL), int(Phase.DECODE))
        repeats_T &= np.isin(decider_phase_T, phases) & np.isin(batch.phase_T.numpy(), phases)
    return repeats_T


def repeated_routes(step: PackedStep, repeats_T: NDArray[np.bool_], router: Router) -> IntArray:
    """The recorded routes that the tokens of ``repeats_T`` repeat; those of this step must be recorded."""
    row_T = step.batch.row_T.numpy()
    recorded_T = step.tokens.requested_RN[row_T, _decider(step, router)]
    route_N: IntArray = recorded_T[repeats_T].astype(np.int64)
    assert (route_N != UNDECIDED).all(), "a token before the one that it repeats"
    return route_N


def with_repeats(
    answer: RoutingDecision, repeats_N: NDArray[np.bool_], route_N: IntArray
) -> RoutingDecision:
    """The answer for the asked among N fresh tokens, as one for all of them.

    Args:
        answer: of the router, in order.
        repeats_N: which tokens it was not asked about.
        route_N: of all.
    """
    asked = torch.from_numpy(np.flatnonzero(~repeats_N))
    return replace(answer.among(asked, len(repeats_N), REPEATED), route_T=torch.from_numpy(route_N))


def tokens_ahead(step: PackedStep, block: int) -> TokenBatch | None:
    """The prompt tokens behind the step's chunks, up to the next multiple of ``block``; None where there are none.

    Only of chunks that enter a new block: what is behind the others was ahead of an earlier chunk.
    """
    stop_C = step.start_C + step.length_C
    prompt_len_C = step.state_C["prompt_len"]
    limit_C = np.minimum(-(-stop_C // block) * block, prompt_len_C)
    enters_C = -(-step.start_C // block) * block < stop_C
    of = np.flatnonzero(enters_C & (stop_C < limit_C))
    of = of[step.tokens.requested_RN[step.row_C[of], stop_C[of]] == UNDECIDED]
    if not len(of):
        return None
    num_ahead_C = limit_C[of] - stop_C[of]
    positions_A = ranges(stop_C[of], num_ahead_C)
    row_A = np.repeat(step.row_C[of], num_ahead_C)
    return token_batch(step.tokens, row_A, positions_A, np.repeat(prompt_len_C[of], num_ahead_C))


def _decider(step: PackedStep, router: Router) -> IntArray:
    """Per token, the position that decides for it."""
    positions_T: IntArray = step.batch.positions_T.numpy()
    return positions_T - positions_T % router.decides_every
