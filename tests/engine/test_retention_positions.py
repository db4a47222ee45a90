"""Guards positions after an eviction: the next one is tokens seen, never tokens kept, or a request repeats itself.

The oracle runs the finished sequence densely, at original positions, under the mask of what was still there, and draws
every token again from its logits. N tokens of a request, T tokens of a forward, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.draws import Drawer, sample
from tests.engine.retention_cases import every_policy, options
from tests.engine.tools import NEAR_TIE, greedy, prompts, routed_logits, run_all, tiny, twin
from tests.engine.watched import Watched, seen_mask
from tokenrouter import LLM, RequestOutput, SamplingParams
from tokenrouter.engine.sampler import Sampler
from tokenrouter.kvcache.retention import RetentionOptions
from tokenrouter.models import Decoder
from tokenrouter.routers import RandomRouter
from tokenrouter.types import ForwardBatch

PARAMS = {
    "greedy": greedy(40, logprobs=0),
    "sampled": SamplingParams(
        temperature=0.9, top_p=0.95, seed=11, max_tokens=40, ignore_eos=True, logprobs=0
    ),
}
PATHS = ("high", "low")
Change = Callable[[ForwardBatch], ForwardBatch]


def kept_as_position(batch: ForwardBatch) -> ForwardBatch:
    """The planted bug: each token at the number of entries that are left before it."""
    attention = batch.kv[0].attention
    stop_B = attention.query_start_B + attention.num_queries_B
    num_evicted_B = stop_B - attention.num_keys_B
    positions_T = batch.positions_T.clone()
    positions_T[attention.query_rows_T] -= num_evicted_B.repeat_interleave(attention.num_queries_B)
    return replace(batch, positions_T=positions_T)


class Served:
    """Some requests that generate under a policy, and the positions at which their tokens were fed."""

    def __init__(
        self,
        retention: RetentionOptions,
        params: SamplingParams,
        patch: pytest.MonkeyPatch,
        change: Change = lambda batch: batch,
    ) -> None:
        self.params = params
        self.router = RandomRouter(0.5)
        llm = LLM(tiny(), router=self.router, executors=twin(), options=options(retention))
        self.watched = Watched(llm)
        self.wrong: list[tuple[str, list[int]]] = []
        self.num_decoded_behind_gaps = 0
        forward = Decoder.forward

        def watched_forward(decoder: Decoder, batch: ForwardBatch, *args: Any) -> Tensor:
            changed = change(batch)
            self._note(changed)
            return forward(decoder, changed, *args)

        patch.setattr(Decoder, "forward", watched_forward)
        for index in (0, 2, 5):
            self.watched.ask(str(index), prompts()[index], params)
        self.outputs: dict[str, RequestOutput] = run_all(llm)

    def _note(self, batch: ForwardBatch) -> None:
        """Positions that are not those of the request's next tokens, by its own history."""
        attention = batch.kv[0].attention
        counts = attention.num_queries_B.tolist()
        by_row = {r.row: r for r in self.watched.llm.engine.scheduler.running}
        fed = batch.positions_T[attention.query_rows_T].split(counts)
        for row, positions in zip(attention.row_B.tolist(), fed, strict=True):
            request = by_row[row]
            start = request.num_computed
            if positions.tolist() != list(range(start, start + len(positions))):
                self.wrong.append((request.request_id, positions.tolist()))
            if request.decoding:
                assert start == request.num_tokens - 1
                at_GN = request.evicted_at_GN
                self.num_decoded_behind_gaps += at_GN is not None and at_GN.min() <= start

    def assert_like_a_dense_run(self) -> None:
        """Every token and its log-probability, drawn again from the oracle's logits."""
        for name in self.watched.requests:
            (completion,) = self.outputs[name].outputs
            ids, logits_NV = completion.token_ids, self.dense_logits(name)
            assert completion.logprobs is not None
            for n, (expected, got) in enumerate(zip(self.draw(logits_NV, ids), ids, strict=True)):
                best = logits_NV[n].topk(2).values
                is_tie = self.params.greedy and float(best[0] - best[1]) < NEAR_TIE
                assert got == expected or is_tie, f"token {n} of request {name}"
            ours = [entry[i].logprob for entry, i in zip(completion.logprobs, ids, strict=True)]
            theirs = logits_NV.log_softmax(-1)[torch.arange(len(ids)), list(ids)]
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)

    def dense_logits(self, name: str) -> Tensor:
        """``[N, V]`` that its N output tokens come from, along its own routes."""
        request = self.watched.requests[name]
        ids = request.history.ids[: request.num_tokens - 1].tolist()
        mask_NN = seen_mask(len(ids), self.watched.evicted_at(name))
        logits_NV = routed_logits(
            ids,
            lambda position, _: PATHS[request.requested_N[position]],
            lambda _: "high",
            lambda _: mask_NN,
        )
        return logits_NV[request.prompt_len - 1 :]

    def draw(self, logits_NV: Tensor, ids: Sequence[int]) -> list[int]:
        """The oracle's tokens, each after the request's own earlier ones, by a sampler of its own."""
        sampler, state = Sampler(logits_NV.shape[1], seed=0), Drawer(self.params, ())
        drawn = []
        for row_V, token in zip(logits_NV, ids, strict=True):
            drawn.append(int(sample(sampler, row_V[None], [state], frozenset()).ids_B))
            state.advance(token)
        return drawn


@every_policy
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_no_repetition_after_eviction_because_the_next_position_is_tokens_seen(
    retention: RetentionOptions, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repetition loops after eviction: the next position mixed up with the number of entries that are kept."""
    served = Served(retention, params, monkeypatch)
    assert served.wrong == []
    assert served.num_decoded_behind_gaps > 60
    assert sum(map(served.watched.num_evicted, served.watched.requests)) > 60
    served.assert_like_a_dense_run()


@every_policy
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_kept_entries_counted_as_position_would_be_seen(
    retention: RetentionOptions, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check of positions, and an oracle, that pass whatever the positions are: the bug is planted."""
    served = Served(retention, params, monkeypatch, kept_as_position)
    assert served.wrong
    with pytest.raises(AssertionError):
        served.assert_like_a_dense_run()
