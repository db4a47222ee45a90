"""Where two systems' outputs part, and what was decided and evicted there."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenrouter.engine.decision_log import DecisionRecorder
from tokenrouter.evaluation.generations import first_difference
from tokenrouter.outputs import CompletionOutput, Logprob, RequestOutput
from tokenrouter.tasks.bisect_systems import Served

FEW = 5
PROMPT_TOKENS, PROMPT_CHARACTERS = 24, 48


class Decision(NamedTuple):
    """What the router said of one token; ``score`` is NaN where it has none."""

    requested: str
    executed: str
    score: float
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first token of one request that differs between two systems. All before it are equal.

    Attributes:
        request: its number in the workload.
        prompt: its first words.
        output_token: number of the differing token in the output, from 0.
        position: of the token before it in the request: the one whose forward made it.
        before_id, after_id: what the two systems chose; ``before_text`` and ``after_text`` the same as text.
        requested, executed, score, reason: the decision of the token at ``position`` in the second system.
        routes_seen: by route, the tokens up to ``position`` that ran on it in the second system.
        num_evicted: entries that the token at ``position`` did not see, because they had been evicted.
        evicted_at: of the first ``FEW`` of these: position, and the number of tokens at which it was evicted.
        best_gap_logits: between the two most likely tokens, in the first system.
        swap_gap_logits: between the two chosen tokens, in the first system; None: the second one was not among its
            candidates.
        is_near_tie: that gap is below the limit.
    """

    request: int
    prompt: str
    output_token: int
    position: int
    before_id: int
    after_id: int
    before_text: str
    after_text: str
    requested: str
    executed: str
    score: float
    reason: str
    routes_seen: dict[str, int]
    num_evicted: int
    evicted_at: dict[int, int]
    best_gap_logits: float
    swap_gap_logits: float | None
    is_near_tie: bool

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return asdict(self)


def find_differences(before: Served, after: Served, *, near_tie_logits: float) -> list[Difference]:
    """One Difference for every request whose greedy outputs part, in the order of the requests.

    Args:
        before: a system's pass.
        after: another system's pass over the same requests.
        near_tie_logits: two logits closer than this are a near-tie.
    """
    pairs = zip(before.repeat.outputs, after.repeat.outputs, strict=True)
    return [
        _difference(number, token, old, after, near_tie_logits)
        for number, (old, new) in enumerate(pairs)
        if (token := first_difference(_only(old).token_ids, _only(new).token_ids)) is not None
    ]


def unseen_entries(evicted_at_N: NDArray[np.int32] | None, position: int) -> dict[int, int]:
    """Positions whose entries the query at ``position`` does not see, and when they were evicted.

    Args:
        evicted_at_N: int32 per position, the number of tokens that the request had when its entry was evicted; None:
            nothing was.
        position: of the query in its request.
    """
    if evicted_at_N is None:
        return {}
    gone = np.flatnonzero(evicted_at_N <= position)
    return dict(zip(gone.tolist(), evicted_at_N[gone].tolist(), strict=True))


def _difference(
    number: int, token: int, old: RequestOutput, after: Served, near_tie_logits: float
) -> Difference:
    llm, request_id = after.llm, str(number)
    new = _only(after.repeat.outputs[number])
    before_id, after_id = _only(old).token_ids[token], new.token_ids[token]
    position = len(old.prompt_token_ids) + token - 1
    decision = _decision(after.decisions, request_id, position, llm.engine.route_table.names)
    evicted_at = unseen_entries(after.evicted_at.get(request_id), position)
    best_gap, swap_gap = _gaps(_candidates(_only(old), token), before_id, after_id)
    counts = np.bincount(new.routes[: position + 1], minlength=len(llm.engine.route_table.names))
    prompt = llm.tokenizer.decode(list(old.prompt_token_ids[:PROMPT_TOKENS]))
    return Difference(
        request=number,
        prompt=" ".join(prompt.split())[:PROMPT_CHARACTERS],
        output_token=token,
        position=position,
        before_id=before_id,
        after_id=after_id,
        before_text=llm.tokenizer.decode([before_id]),
        after_text=llm.tokenizer.decode([after_id]),
        **decision._asdict(),
        routes_seen=dict(zip(llm.engine.route_table.names, counts.tolist(), strict=True)),
        num_evicted=len(evicted_at),
        evicted_at=dict(list(evicted_at.items())[:FEW]),
        best_gap_logits=best_gap,
        swap_gap_logits=swap_gap,
        is_near_tie=swap_gap is not None and swap_gap < near_tie_logits,
    )


def _only(output: RequestOutput) -> CompletionOutput:
    return output.outputs[0]


def _candidates(completion: CompletionOutput, token: int) -> dict[int, Logprob]:
    assert completion.logprobs is not None, "a bisection asks for log-probabilities"
    return completion.logprobs[token]


def _gaps(
    candidates: dict[int, Logprob], before_id: int, after_id: int
) -> tuple[float, float | None]:
    """Differences of log-probabilities, which are those of the logits: of the two best, and of the two chosen."""
    values = {token: entry.logprob for token, entry in candidates.items()}
    best = sorted(values.values(), reverse=True)
    swap = values[before_id] - values[after_id] if after_id in values else None
    return best[0] - best[1], swap


def _decision(
    recorder: DecisionRecorder, request_id: str, position: int, route_names: Sequence[str]
) -> Decision:
    """The recorded decision of one token; each token has exactly one."""
    number = recorder.request_ids.index(request_id)
    for block in recorder.blocks:
        is_it_T = (block["request_index"] == number) & (block["position"] == position)
        for row in np.flatnonzero(is_it_T):
            return Decision(
                requested=route_names[block["requested"][row]],
                executed=route_names[block["executed"][row]],
                score=float(block["score"][row]),
                reason=recorder.reasons[block["reason"][row]],
            )
    raise AssertionError(f"no decision of request {request_id} at position {position}")
