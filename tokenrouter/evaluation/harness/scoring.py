"""Log-likelihoods of continuations through the engine, each beginning that several have in common computed once.

Inputs are sorted, so that those which begin alike are neighbours, and run in waves: an input whose beginning another
one computes comes a wave behind it and finds the entries in the prefix cache. Equal inputs run once.

V vocabulary, R rows handed over at once.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from tokenrouter import LLM, EngineOptions
from tokenrouter.engine.prefix_key import ALIKE, is_shareable
from tokenrouter.evaluation.progress import Tick
from tokenrouter.routers import Router

PREFIX_BLOCK = 4
"""Questions have few tokens: with blocks of 32 most choices would share nothing."""
MIN_NUM_SEQS = 64
"""Inputs are short: with 32 of them a step is not full."""


class Pair(NamedTuple):
    """Token ids: what is given, at least one, and what is scored, at least one."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """Log-likelihood in nats, and whether greedy decoding would give exactly this continuation."""

    logprob: float
    is_greedy: bool


@dataclass(frozen=True, slots=True)
class _Input:
    """Tokens that run once.

    Attributes:
        ids: context and continuation without its last token.
        targets: (index of the pair, its continuation), whose tokens follow the last ones of ``ids``.
    """

    ids: tuple[int, ...]
    targets: list[tuple[int, tuple[int, ...]]]

    @property
    def start(self) -> int:
        """The first position whose logits are needed."""
        return len(self.ids) - max(len(continuation) for _, continuation in self.targets)


def scoring_options(options: EngineOptions, router: Router) -> EngineOptions:
    """``options`` for an engine that scores with ``router``.

    Beginnings are shared where that changes no decision, and no entry is evicted or rewritten.
    """
    num_seqs = max(options.max_num_seqs, min(MIN_NUM_SEQS, options.max_num_batched_tokens))
    wider = replace(options, max_num_seqs=num_seqs)
    if options.retention is not None or not _shares(router):
        return wider
    return replace(wider, prefix_sharing=True, prefix_block=PREFIX_BLOCK)


def score_pairs(llm: LLM, pairs: Sequence[Pair], tick: Tick | None = None) -> list[Score]:
    """Log-likelihood of every continuation after its context, in order, in forced prefill.

    A pair that is longer than the model loses tokens at its beginning, as in the harness.

    Args:
        llm: its engine is idle. With ``scoring_options`` beginnings are shared, where its router's answer for a token
            depends on no later one.
        pairs: token ids.
        tick: told of every pair that is done.

    Raises:
        ValueError: an empty context or continuation, a continuation longer than the model, or unknown ids.
    """
    scores: list[Score | None] = [None] * len(pairs)
    inputs = _distinct(pairs, llm.model.config.max_model_len)
    try:
        for part in _parts(inputs, llm.engine.pool.num_slots // 2):
            for wave in _waves(part, _block(llm)):
                _score(llm, wave, scores, tick)
    finally:
        llm.engine.drop_prefixes()
    return [score for score in scores if score is not None]


def _distinct(pairs: Sequence[Pair], max_model_len: int) -> list[_Input]:
    """Each different input once, in the order of its ids."""
    found: defaultdict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
    for index, (context, continuation) in enumerate(pairs):
        if not len(context) or not len(continuation):
            raise ValueError(f"pair {index} needs a context and a continuation of a token or more")
        if len(continuation) > max_model_len:
            raise ValueError(
                f"the continuation of pair {index} has {len(continuation)} tokens, and the model's length is "
                f"{max_model_len}: shorten it"
            )
        ids = (*context, *continuation)[-(max_model_len + 1) : -1]
        found[ids].append((index, tuple(continuation)))
    return [_Input(ids, found[ids]) for ids in sorted(found)]


def _parts(inputs: Sequence[_Input], most_tokens: int) -> list[list[_Input]]:
    """Neighbours together, at most so many tokens or one input: their beginnings must stay in the pool."""
    parts: list[list[_Input]] = []
    left = 0
    for one in inputs:
        if not parts or len(one.ids) > left:
            parts.append([])
            left = most_tokens
        parts[-1].append(one)
        left -= len(one.ids)
    return parts


def _block(llm: LLM) -> int | None:
    """Lengths that are shared are multiples of it; None: nothing is, or only among prompts that are alike."""
    return llm.options.block_tokens if llm.options.prefix_sharing and _shares(llm.router) else None


def _shares(router: Router) -> bool:
    """Whether its answers for a beginning are the same in every prompt that has it."""
    return is_shareable(router) and not router.depends_on & ALIKE and router.level == "token"


def _waves(inputs: Sequence[_Input], block: int | None) -> list[list[_Input]]:
    """Every input behind the first one that computes what it can use; without ``block`` all at once."""
    if block is None:
        return [list(inputs)]
    waves: list[list[_Input]] = []
    path: list[
        tuple[int, int]
    ] = []  # (length, wave): of the last input the beginning to there is computed by then
    last: tuple[int, ...] = ()
    for one in inputs:
        common = _num_common(last, one.ids)
        path = [(min(length, common), wave) for length, wave in path]
        shared = min(common, one.start) // block * block
        wave = 1 + min((w for length, w in path if length >= shared), default=-1) if shared else 0
        path = [(length, w) for length, w in path if w < wave and length]
        path.append((len(one.ids), wave))
        waves += [[] for _ in range(wave + 1 - len(waves))]
        waves[wave].append(one)
        last = one.ids
    return waves


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids both begin with."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def _score(llm: LLM, wave: Sequence[_Input], scores: list[Score | None], tick: Tick | None) -> None:
    """Runs inputs at once; a pair's score is summed up as its rows come in."""

    def add(index: int, position: int, logits_RV: Tensor) -> None:
        one = wave[index]
        lse_R, best_R = logits_RV.logsumexp(dim=-1), logits_RV.argmax(dim=-1)
        for pair, continuation in one.targets:
            skip = max(len(one.ids) - len(continuation) - position, 0)
            first = position + skip - (len(one.ids) - len(continuation))
            wanted_R = logits_RV.new_tensor(continuation[first : first + len(lse_R) - skip]).long()
            if not len(wanted_R):
                continue
            found_R = logits_RV[skip:].gather(1, wanted_R[:, None])[:, 0] - lse_R[skip:]
            before = scores[pair] or Score(0.0, True)
            scores[pair] = Score(
                before.logprob + float(found_R.double().sum()),
                before.is_greedy and bool((best_R[skip:] == wanted_R).all()),
            )
            if tick is not None and first + len(wanted_R) == len(continuation):
                tick(count=1)

    llm.score([one.ids for one in wave], sink=add, logits_from=[one.start for one in wave])
