"""Guards retention in the engine: logits are those of a dense run where query q sees key k iff k <= q < evicted_at[k].

N tokens of a request, V vocabulary, G layer groups (one).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.engine.tools import greedy, prompts, run_all, tiny, tiny_pair, tokens, twin
from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.executors import build_pool
from tokenrouter.kvcache import compaction
from tokenrouter.kvcache.retention import (
    Entries,
    Full,
    HeavyHitter,
    KeyNorm,
    ObservationWindow,
    Random,
    RetentionOptions,
    RetentionPolicy,
    RouteClass,
    SinkWindow,
    Threshold,
)
from tokenrouter.routers import RandomRouter
from tokenrouter.scheduler import Request
from tokenrouter.scheduler.request import NEVER

POLICIES: list[RetentionPolicy] = [
    HeavyHitter(),
    ObservationWindow(pool_size=3),
    KeyNorm(),
    Random(),
    SinkWindow(evicted_frac=0.75),
    SinkWindow(evicted_frac=0, max_entries=9),
    Threshold(threshold=1.0),
    RouteClass(),
]
every_policy = pytest.mark.parametrize(
    "policy", POLICIES, ids=lambda p: f"{p.name}{POLICIES.index(p)}"
)


def options(policy: RetentionPolicy, **changes: Any) -> EngineOptions:
    """Decisions so often that a prompt of 90 tokens has ten."""
    retention = RetentionOptions(policy=policy, interval=8, window=4, layers=2, sinks=2, recent=3)
    return EngineOptions(**{"max_num_batched_tokens": 64, "retention": retention} | changes)


@dataclass
class Watched:
    """Runs requests and keeps what is known of each of them at the end."""

    llm: LLM
    requests: dict[str, Request] = field(default_factory=dict)
    logits: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, name: str, prompt: Sequence[int], forced: Sequence[int]) -> None:
        """A request whose logits of every position are kept."""
        rows: list[Tensor] = self.logits.setdefault(name, [])
        self.llm.engine.add_request(
            name,
            prompt,
            SamplingParams(),
            forced_ids=forced,
            logits_sink=lambda _, logits_RV: rows.append(logits_RV.clone()),
            wants_all_logits=True,
        )
        for request in self.llm.engine.scheduler.waiting:
            self.requests.setdefault(request.request_id, request)

    def evicted_at(self, name: str) -> list[int]:
        """Per position of the request."""
        evicted_at_GN = self.requests[name].evicted_at_GN
        assert evicted_at_GN is not None
        return [int(at) for at in evicted_at_GN[0]]


def dense_logits(family: str, ids: Sequence[int], evicted_at: Sequence[int]) -> Tensor:
    """``[N, V]`` by transformers under the mask of what was still there."""
    query_N1, key_1N = torch.arange(len(ids))[:, None], torch.arange(len(ids))
    seen_NN = (key_1N <= query_N1) & (query_N1 < torch.tensor(evicted_at)[: len(ids)])
    mask_11NN = torch.zeros(1, 1, *seen_NN.shape).masked_fill(~seen_NN, float("-inf"))
    with torch.inference_mode():
        logits: Tensor = tiny_pair(family)[1](
            torch.tensor([list(ids)]), attention_mask=mask_11NN
        ).logits[0]
    return logits


@every_policy
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_those_of_a_dense_run_with_the_same_gaps(
    policy: RetentionPolicy, backend: str, family: str
) -> None:
    """RoPE at the number kept instead of the position, an entry read after it was evicted, a token written to the slot
    of an entry that is still there, a mask shifted by one."""
    model = tiny(family)
    executors = build_pool("full", model, kernels=backend)
    watched = Watched(LLM(model, executors=executors, options=options(policy)))
    cases = {str(i): (p, prompts(seed=5)[i][:40]) for i, p in enumerate(prompts()[:7])}
    for name, (prompt, forced) in cases.items():
        watched.add(name, prompt, forced)
    run_all(watched.llm)
    num_evicted = 0
    for name, (prompt, forced) in cases.items():
        ids, evicted_at = [*prompt, *forced], watched.evicted_at(name)
        got_NV = torch.cat(watched.logits[name])
        assert len(got_NV) == len(ids)
        assert_close(got_NV, dense_logits(family, ids, evicted_at), rtol=1e-4, atol=1e-4)
        evicted = [(k, at) for k, at in enumerate(evicted_at) if at != NEVER]
        assert all(at % 8 == 0 and at >= k + 3 for k, at in evicted)
        assert not [k for k, _ in evicted if k < 2], "a sink was evicted"
        num_evicted += len(evicted)
    assert num_evicted > 100
    assert watched.llm.engine.stats.evicted_entries == num_evicted


SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "small chunks": {"max_num_batched_tokens": 32, "max_num_seqs": 4},
    "tokens one by one": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "preempted": {"max_num_seqs": 8},
    "static": {"scheduler": "static_batch", "max_num_seqs": 6, "static_batch_size": 6},
}


@every_policy
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_same_is_evicted_whatever_happens_around(policy: RetentionPolicy, setting: str) -> None:
    """Decisions that depend on company, chunk sizes, or on whether a token ran in prefill, decode or a recompute."""
    changes = SETTINGS[setting]
    if setting == "preempted":
        changes = changes | {"num_kv_slots": 122 if policy.max_kept(400) > 50 else 40}
    first, second = (
        Watched(LLM(tiny(), executors=build_pool("full", tiny()), options=options(policy, **more)))
        for more in ({}, changes)
    )
    for watched in (first, second):
        for index, prompt in enumerate(prompts()[:8]):
            watched.add(str(index), prompt, prompts(seed=5)[index][:30])
        run_all(watched.llm)
    num_evicted = num_differing = 0
    for name in first.requests:
        ours, theirs = np.array(first.evicted_at(name)), np.array(second.evicted_at(name))
        num_evicted += int((ours != NEVER).sum())
        if (ours != theirs).any():  # scores that differ in the last bit may rank another entry last
            num_differing += int((ours != theirs).sum())
            continue
        ours_NV, theirs_NV = (torch.cat(w.logits[name]) for w in (first, second))
        assert_close(ours_NV, theirs_NV, rtol=1e-4, atol=1e-4)
    assert num_evicted > 100 and num_differing <= 4
    if setting == "preempted":
        assert second.llm.engine.stats.num_preemptions > 0


def test_generated_text_is_the_same_after_a_recompute() -> None:
    """Sampled, not forced: the next position mixed up with the number kept, or a loop after an eviction."""
    outputs = []
    for more in ({}, {"num_kv_slots": 110, "max_num_seqs": 8}, {"max_num_seqs": 1}):
        llm = LLM(tiny(), options=options(SinkWindow(), **more))
        outputs.append([tokens(o) for o in llm.generate(prompts()[:12], greedy(40))])
    assert llm.engine.stats.evicted_entries > 100
    assert outputs[0] == outputs[1] == outputs[2]


def test_evicting_nothing_is_bit_equal_to_full() -> None:
    """Another order of sums, or positions read from the table, where nothing is missing."""
    results = []
    for policy in (Full(), HeavyHitter(evicted_frac=0.0), Threshold(threshold=1e-9)):
        watched = Watched(LLM(tiny(), options=options(policy)))
        for index, prompt in enumerate(prompts()[:6]):
            watched.add(str(index), prompt, prompts(seed=5)[index][:30])
        run_all(watched.llm)
        assert watched.llm.engine.stats.evicted_entries == 0
        assert watched.llm.engine.stats.retention_decisions > 20
        results.append(torch.cat([torch.cat(rows) for rows in watched.logits.values()]))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_slots_are_free_in_the_step_that_evicts_them_and_reuse_shows_nothing_old() -> None:
    """Freed a step late, or an entry's old content read through a recycled slot: freed slots are filled with NaN."""
    llm = LLM(tiny(), options=options(SinkWindow(evicted_frac=0.9), num_kv_slots=96))
    arena, pool = llm.engine._parts.arena, llm.engine.pool
    expected = LLM(tiny(), options=options(SinkWindow(evicted_frac=0.9))).generate(
        prompts()[:10], greedy(30)
    )
    for index, prompt in enumerate(prompts()[:10]):
        llm.engine.add_request(str(index), prompt, greedy(30))
    last = {}
    while llm.engine.has_unfinished():
        before = llm.engine.stats.evicted_entries
        live = pool.live
        for output in llm.engine.step():
            last[output.request_id] = output
        pool.check_integrity()
        freed = llm.engine.stats.evicted_entries - before
        assert pool.live <= live + 64 - freed or not freed
        table = pool.tables[0]
        used = np.concatenate(
            [table.slots_RN[r.row, : table.num_kept_R[r.row]] for r in llm.engine.scheduler.running]
            or [np.zeros(0, np.int64)]
        )
        unused = np.setdiff1d(np.arange(pool.num_slots), used)
        arena.kv_LSPD[:, torch.from_numpy(unused)] = float("nan")
    assert [tokens(last[str(i)]) for i in range(10)] == [tokens(o) for o in expected]


def test_output_without_a_limit_goes_on_while_entries_fit() -> None:
    """A request that ends at the pool's size, counted in tokens, though most of its entries are gone by then."""
    llm = LLM(tiny(), options=options(SinkWindow(evicted_frac=0.9), num_kv_slots=60))
    fitting = next(n for n in range(10_000) if llm.engine.pool.slots_for(n + 1) > 60)
    for prompt in (prompts()[2][:59], prompts()[2]):
        (output,) = llm.generate([prompt], greedy(None))
        assert len(prompt) + len(tokens(output)) == fitting + 1
    plain = LLM(tiny(), options=EngineOptions(num_kv_slots=100))
    (output,) = plain.generate([prompts()[2]], greedy(None))
    assert len(prompts()[2]) + len(tokens(output)) == 101


def test_a_policy_that_raises_stops_no_request() -> None:
    """Tokens computed and never accepted: the request is then neither in decode nor in prefill, and never ends."""

    class Broken(SinkWindow):
        num_calls = 0

        def keep(self, entries: Entries, is_guarded_N: Tensor) -> Tensor:
            self.num_calls += 1
            if self.num_calls in (2, 5):
                raise RuntimeError("injected")
            return super().keep(entries, is_guarded_N)

    llm = LLM(tiny(), options=options(Broken()))
    for index in range(3):
        llm.engine.add_request(str(index), prompts()[index], greedy(20))
    num_failures, num_tokens = 0, {}
    for _ in range(200):
        try:
            outputs = llm.engine.step()
        except RuntimeError:
            num_failures += 1
            continue
        num_tokens |= {o.request_id: len(o.outputs[0].token_ids) for o in outputs}
        if not llm.engine.has_unfinished():
            break
    assert num_failures == 2 and num_tokens == dict.fromkeys("012", 20)
    llm.engine.pool.check_integrity()
    assert llm.engine.pool.free == llm.engine.pool.num_slots


def test_protected_tokens_count_at_admission() -> None:
    """A request that a budget would let into a pool, and whose protected tokens then never fit it: it would preempt
    itself for ever."""
    policy = RouteClass(evicted_frac=0.9, classes={"high": "protect", "low": "drop_first"})
    for share in (0.0, 1.0):
        llm = LLM(
            tiny(),
            router=RandomRouter(share),
            executors=twin(),
            options=options(policy, num_kv_slots=60, max_num_seqs=2),
        )
        assert llm.engine.pool.slots_for(120) == 120
        with pytest.raises(ValueError, match="KV slots"):
            llm.engine.add_request("a", prompts()[2], greedy(30))
    llm = LLM(tiny(), options=options(SinkWindow(evicted_frac=0.9), num_kv_slots=60))
    assert tokens(llm.generate([prompts()[2]], greedy(30))[0])


def test_refusals() -> None:
    """A policy that judges entries by layers that it never looks at, or routes that the router does not have."""
    retention = RetentionOptions(policy=HeavyHitter(), layers=(7,))
    with pytest.raises(ValueError, match="layers of 0 to 3"):
        LLM(tiny(), options=EngineOptions(retention=retention))
    with pytest.raises(ValueError, match="classes names the routes fast"):
        LLM(tiny(), options=options(RouteClass(classes={"fast": "normal"})))


def test_entries_that_move_change_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that a plan, a statistic or a promise still names after the entries have moved."""
    monkeypatch.setattr(compaction, "MIN_SLOTS", 20)
    monkeypatch.setattr(compaction, "MIN_FREE_FRAC", 0.2)
    monkeypatch.setattr(compaction, "PATIENCE_STEPS", 0)
    results = []
    for policy in (Full(), HeavyHitter()):
        llm = LLM(tiny(), options=options(policy))
        outputs = llm.generate(prompts()[:12], greedy(40))
        assert llm.engine.stats.num_compactions > 3
        num_bytes = llm.engine.pool.num_touched * llm.engine.kv_bytes_per_slot
        assert num_bytes <= llm.engine.stats.peak_allocated_bytes
        results.append([tokens(o) for o in outputs])
    monkeypatch.undo()
    for policy, moved in zip((Full(), HeavyHitter()), results, strict=True):
        llm = LLM(tiny(), options=options(policy))
        assert [tokens(o) for o in llm.generate(prompts()[:12], greedy(40))] == moved
        assert llm.engine.stats.num_compactions <= 1
