"""Guards prefix sharing in the engine: a hit gives what a cold run gives, and changes nothing for anybody else."""

import numpy as np
import pytest
import torch

from tests.engine.prefix_tools import BASE, cold, every_policy, options, warm
from tests.engine.tools import greedy, prompts, run_all, tiny, tokens
from tests.engine.watched import Watched, assert_same
from tokenrouter import LLM, SamplingParams
from tokenrouter.executors import build_pool
from tokenrouter.kvcache.retention import HeavyHitter, RetentionPolicy
from tokenrouter.routers import RandomRouter

CASES: dict[str, tuple[int, ...]] = {
    "first": BASE[:70],
    "again": BASE[:70],
    "longer": (*BASE[:70], *BASE[:19]),
    "branches off": (*BASE[:37], *BASE[60:80]),
    "whole blocks": BASE[:64],
    "whole blocks again": BASE[:64],
    "one block": BASE[:8],
    "one token more": BASE[:65],
}
SHARED = {
    "first": 0,
    "again": 64,
    "longer": 64,
    "branches off": 32,
    "whole blocks": 56,
    "whole blocks again": 56,
    "one block": 0,
    "one token more": 64,
}


@every_policy
def test_a_hit_equals_a_cold_run(policy: RetentionPolicy | None) -> None:
    """Positions counted from the hit, statistics or evictions that start anew, decisions taken again; a prompt that is
    cached to its last token and a multiple of the block and of the chunk, whose logits nobody computes."""
    router = RandomRouter(0.5)
    first, second = Watched(warm(policy, router)), Watched(cold(policy, router))
    num_evicted = 0
    for index, (name, prompt) in enumerate(CASES.items()):
        forced = prompts(seed=5)[index + 3][:30]
        assert first.run(name, prompt, forced) == SHARED[name], name
        second.run(name, prompt, forced)
        num_evicted += assert_same(first, second, name)
    assert num_evicted > 100 or policy is None
    assert first.llm.engine.stats.shared_tokens == sum(SHARED.values())
    ran = int(first.llm.engine.stats.executed_tokens.sum())
    assert ran == int(second.llm.engine.stats.executed_tokens.sum()) - sum(SHARED.values())


@every_policy
def test_nobody_notices_what_others_share_and_evict(policy: RetentionPolicy | None) -> None:
    """An eviction, an end or a recompute of one request that reaches into the entries of another: freed slots are
    filled with NaN."""
    llm = warm(policy, RandomRouter(0.5), num_kv_slots=150, max_num_seqs=5)
    together, alone = Watched(llm), Watched(cold(policy, RandomRouter(0.5)))
    arena, pool = llm.engine._parts.arena, llm.engine.pool

    def poison() -> None:
        table = pool.tables[0]
        unused_S = table.slots._users_S[: pool.num_slots] == 0
        arena.kv_LSPD[:, torch.from_numpy(np.flatnonzero(unused_S))] = float("nan")

    cases = {
        str(i): ((*BASE[: 10 * (i % 6) + 15], *prompts()[i][:9]), prompts(seed=5)[i][:25])
        for i in range(14)
    }
    for name, (prompt, forced) in cases.items():
        together.add(name, prompt, forced)
    run_all(llm, poison)
    num_evicted = 0
    for name, (prompt, forced) in cases.items():
        alone.run(name, prompt, forced)
        num_evicted += assert_same(together, alone, name)
    assert llm.engine.stats.shared_tokens > 60
    assert num_evicted > 100 or policy is None
    llm.engine.drop_prefixes()
    assert pool.free == pool.num_slots


@pytest.mark.parametrize("host_slots", [0, 400])
@pytest.mark.parametrize("policy", [None, HeavyHitter(max_entries=20)], ids=["none", "evicting"])
def test_preempted_requests_share_and_come_back(
    policy: RetentionPolicy | None, host_slots: int
) -> None:
    """A recompute that takes over a prefix of other decisions, or a swap that takes shared slots away."""
    router = RandomRouter(0.5)
    slots = 100 if policy is None else 60
    tight = warm(policy, router, num_kv_slots=slots, max_num_seqs=6, num_host_slots=host_slots)
    if tight.engine.scheduler.host is not None:
        tight.engine.scheduler.host._recompute_s = float("inf")
    together, alone = Watched(tight), Watched(cold(policy, router))
    cases = {
        str(i): ((*BASE[:24], *prompts()[i][:20]), prompts(seed=5)[i + 3][:30]) for i in range(10)
    }
    for name, (prompt, forced) in cases.items():
        together.add(name, prompt, forced)
    run_all(tight)
    for name, (prompt, forced) in cases.items():
        alone.run(name, prompt, forced)
        assert_same(together, alone, name)
    assert tight.engine.stats.num_preemptions > 0 and tight.engine.stats.shared_tokens > 40


def test_one_system_prompt_needs_its_slots_once() -> None:
    """Admission that counts a shared beginning for everyone: the pool then holds a few requests instead of many."""
    llm = warm(None, num_kv_slots=140, max_num_seqs=8)
    llm.generate([BASE[:80]], greedy(1))
    for index in range(8):
        llm.engine.add_request(str(index), (*BASE[:80], 5 + index), greedy(4))
    llm.engine.step()
    assert len(llm.engine.scheduler.running) == 8 and llm.engine.pool.used <= 80 + 8 * 2
    assert llm.engine.stats.peak_live_slots == 80 + 8
    run_all(llm)


def test_completions_of_one_prompt_share_it() -> None:
    """Later completions that compute what the first one has, though they start after it."""
    llm = warm(None, max_num_seqs=4, max_num_batched_tokens=80)
    params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=6, ignore_eos=True)
    (ours,) = llm.generate([BASE[:80]], params)
    (theirs,) = cold(None).generate([BASE[:80]], params)
    assert llm.engine.stats.shared_tokens == 3 * 72
    assert [one.token_ids for one in ours.outputs] == [one.token_ids for one in theirs.outputs]
    assert len({one.token_ids for one in ours.outputs}) == 4


def test_cached_prefixes_make_way() -> None:
    """A pool full of old prompts refuses new ones, or preempts for them; the newest prompt stays cached longest."""
    llm = warm(None, num_kv_slots=100, max_num_seqs=2)
    expected = cold(None, num_kv_slots=100, max_num_seqs=2)
    for seed in range(6):
        prompt = prompts(seed=seed)[2][:60]
        (ours,), (theirs,) = (x.generate([prompt], greedy(10)) for x in (llm, expected))
        assert tokens(ours) == tokens(theirs)
        assert llm.engine.pool.available == 100 and llm.engine.pool.cached >= 56
    assert llm.engine.stats.num_preemptions == 0 and llm.engine.stats.shared_tokens == 0
    llm.generate([prompts(seed=5)[2][:60]], greedy(10))
    assert llm.engine.stats.shared_tokens == 56


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_prefixes_survive_compaction(dtype: str) -> None:
    """Slots of cached prefixes that keep their old numbers when entries move, or that are given back."""
    asked = options(kv_cache_dtype=dtype, num_kv_slots=400)
    llm = LLM(tiny(), executors=build_pool("full", tiny()), options=asked)
    for seed in range(1, 4):
        llm.generate([prompts(seed=seed)[2][:40]], greedy(40))
    (first,) = llm.generate([BASE[:70]], greedy(20))
    pool, cache = llm.engine.pool, llm.engine.scheduler.sharing.cache  # type: ignore[union-attr]
    assert pool.make_free(310)
    before = [slots.tolist() for slots in cache.held(0)]
    llm.engine._parts.compactor.compact()
    pool.check_integrity()
    assert [slots.tolist() for slots in cache.held(0)] != before
    assert pool.num_touched == pool.cached
    for expected in (64, 128):
        (again,) = llm.generate([BASE[:70]], greedy(20))
        assert llm.engine.stats.shared_tokens == expected
        assert tokens(first) == tokens(again)
