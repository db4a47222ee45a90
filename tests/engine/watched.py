"""Requests that are watched: the logits that each was handed, and which of its entries were evicted when.

N tokens of a request, R rows of logits, V vocabulary, G layer groups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.testing import assert_close

from tests.engine.tools import run_all, tiny_pair
from tokenrouter import LLM, RequestOutput, SamplingParams
from tokenrouter.scheduler import Request
from tokenrouter.scheduler.request import NEVER

Case = tuple[Sequence[int], Sequence[int]]
"""A prompt, and the ids that are fed behind it."""


@dataclass
class Watched:
    """Runs requests and keeps what is known of each at the end: logits that were due, evictions, decisions."""

    llm: LLM
    requests: dict[str, Request] = field(default_factory=dict)
    logits: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        forced: Sequence[int],
        *,
        wants_all_logits: bool = False,
    ) -> None:
        """A forced request that hands over the logits of its prompt's last token and of all later ones, or of all."""
        rows: list[Tensor] = self.logits.setdefault(name, [])
        self.llm.engine.add_request(
            name,
            prompt,
            SamplingParams(),
            forced_ids=forced,
            logits_sink=lambda _, logits_RV: rows.append(logits_RV.clone()),
            wants_all_logits=wants_all_logits,
        )
        self._keep()

    def ask(self, name: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """A request that generates."""
        self.llm.engine.add_request(name, prompt, params)
        self._keep()

    def run(self, name: str, prompt: Sequence[int], forced: Sequence[int]) -> int:
        """One forced request from beginning to end; returns how many of its tokens were shared."""
        before = self.llm.engine.stats.shared_tokens
        self.add(name, prompt, forced)
        run_all(self.llm)
        return self.llm.engine.stats.shared_tokens - before

    def serve(
        self,
        cases: Mapping[str, Case],
        check: Callable[[], None] | None = None,
        *,
        wants_all_logits: bool = False,
    ) -> dict[str, RequestOutput]:
        """Forced requests at once, to the end; ``check`` after every step."""
        for name, (prompt, forced) in cases.items():
            self.add(name, prompt, forced, wants_all_logits=wants_all_logits)
        return run_all(self.llm, check)

    def logits_of(self, name: str) -> Tensor:
        """``[R, V]``, in the order of positions."""
        return torch.cat(self.logits[name])

    def evicted_at(self, name: str) -> list[int]:
        """Per position of the request, in its first layer group; empty without retention."""
        found = self.requests[name].evicted_at_GN
        return [] if found is None else [int(at) for at in found[0]]

    def num_evicted(self, name: str) -> int:
        """Entries that the request lost in its first layer group."""
        return sum(at != NEVER for at in self.evicted_at(name))

    def _keep(self) -> None:
        for request in self.llm.engine.scheduler.waiting:
            self.requests.setdefault(request.request_id, request)


def assert_same(ours: Watched, theirs: Watched, name: str, other: str | None = None) -> int:
    """Logits, decisions and evictions of a request in two engines; returns how many entries it lost."""
    other = other or name
    assert_close(ours.logits_of(name), theirs.logits_of(other), rtol=1e-4, atol=1e-4)
    ours_N, theirs_N = ours.requests[name].requested_N, theirs.requests[other].requested_N
    assert (ours_N == theirs_N).all()
    assert ours.evicted_at(name) == theirs.evicted_at(other)
    return ours.num_evicted(name)


def seen_mask(num_tokens: int, evicted_at: Sequence[int]) -> Tensor:
    """Bool ``[N, N]``: query q sees key k iff k <= q < evicted_at[k]; without retention all that are not later."""
    query_N1, key_1N = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)
    is_not_later_NN = key_1N <= query_N1
    if not len(evicted_at):
        return is_not_later_NN
    return is_not_later_NN & (query_N1 < torch.tensor(evicted_at)[:num_tokens])


def dense_logits(family: str, ids: Sequence[int], evicted_at: Sequence[int]) -> Tensor:
    """``[N, V]`` by transformers, at original positions, under the mask of what was still there."""
    seen_NN = seen_mask(len(ids), evicted_at)
    mask_11NN = torch.zeros(1, 1, *seen_NN.shape).masked_fill(~seen_NN, float("-inf"))
    with torch.inference_mode():
        logits: Tensor = tiny_pair(family)[1](
            torch.tensor([list(ids)]), attention_mask=mask_11NN
        ).logits[0]
    return logits
