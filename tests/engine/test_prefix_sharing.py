"""Guards prefix sharing in the engine: a hit gives what a cold run gives, and changes nothing for anybody else.

N tokens of a request, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.engine.tools import greedy, prompts, run_all, tiny, tokens, twin
from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.executors import build_pool
from tokenrouter.kvcache.retention import (
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
from tokenrouter.routers import RandomRouter, RequestLevelRouter, Router, RuleRouter
from tokenrouter.scheduler import Request
from tokenrouter.scheduler.request import NEVER

BLOCK = 8
BASE = prompts()[2]
POLICIES: list[RetentionPolicy | None] = [
    None,
    HeavyHitter(),
    ObservationWindow(pool_size=3),
    KeyNorm(),
    Random(),
    SinkWindow(evicted_frac=0.75),
    Threshold(threshold=1.0),
    RouteClass(),
]
every_policy = pytest.mark.parametrize(
    "policy", POLICIES, ids=lambda p: "none" if p is None else p.name
)


def options(policy: RetentionPolicy | None = None, **changes: Any) -> EngineOptions:
    """Shared beginnings at every eighth token, with and without retention."""
    retention = None
    if policy is not None:
        retention = RetentionOptions(
            policy=policy, interval=BLOCK, window=4, layers=2, sinks=2, recent=3
        )
    defaults = {
        "max_num_batched_tokens": 64,
        "retention": retention,
        "prefix_sharing": True,
        "prefix_block": BLOCK,
    }
    return EngineOptions(**defaults | changes)


@dataclass
class Watched:
    """Runs forced requests and keeps what is known of each at the end: logits that were due, evictions, decisions."""

    llm: LLM
    requests: dict[str, Request] = field(default_factory=dict)
    logits: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, name: str, prompt: Sequence[int], forced: Sequence[int]) -> None:
        """A request that hands over the logits of its prompt's last token and of all later ones."""
        rows: list[Tensor] = self.logits.setdefault(name, [])
        self.llm.engine.add_request(
            name,
            prompt,
            SamplingParams(),
            forced_ids=forced,
            logits_sink=lambda _, logits_RV: rows.append(logits_RV.clone()),
        )
        for request in self.llm.engine.scheduler.waiting:
            self.requests.setdefault(request.request_id, request)

    def run(self, name: str, prompt: Sequence[int], forced: Sequence[int]) -> int:
        """One request from beginning to end; returns how many of its tokens were shared."""
        before = self.llm.engine.stats.shared_tokens
        self.add(name, prompt, forced)
        run_all(self.llm)
        return self.llm.engine.stats.shared_tokens - before

    def evicted_at(self, name: str) -> list[int]:
        """Per position of the request, in its only layer group; empty without retention."""
        found = self.requests[name].evicted_at_GN
        return [] if found is None else [int(at) for at in found[0]]


def assert_same(ours: Watched, theirs: Watched, name: str, other: str | None = None) -> int:
    """Logits, decisions and evictions of a request in two engines; returns how many entries it lost."""
    other = other or name
    assert_close(
        torch.cat(ours.logits[name]), torch.cat(theirs.logits[other]), rtol=1e-4, atol=1e-4
    )
    ours_N, theirs_N = ours.requests[name].requested_N, theirs.requests[other].requested_N
    assert (ours_N == theirs_N).all()
    evicted_at = ours.evicted_at(name)
    assert evicted_at == theirs.evicted_at(other)
    return sum(at != NEVER for at in evicted_at)


def cold(policy: RetentionPolicy | None, router: Router | str = "all_high", **changes: Any) -> LLM:
    """The same engine without sharing."""
    asked = options(policy, **{"prefix_sharing": False} | changes)
    return LLM(tiny(), router=router, executors=twin(), options=asked)


def warm(policy: RetentionPolicy | None, router: Router | str = "all_high", **changes: Any) -> LLM:
    """An engine that shares."""
    return LLM(tiny(), router=router, executors=twin(), options=options(policy, **changes))


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


class Unsteady(RandomRouter):
    """Says that it looks at something that is not in the prompt."""

    depends = "history"

    @property
    def depends_on(self) -> Any:
        return frozenset({"tokens", self.depends})


@pytest.mark.parametrize("depends", ["history", "load", "random"])
def test_routers_whose_decisions_may_differ_do_not_share(
    depends: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A decision of another moment taken for one's own; silence about an option without effect."""
    router = Unsteady(0.5)
    router.depends = depends
    llm = warm(None, router)
    assert f"prefix_sharing has no effect: router random depends on {depends}" in caplog.text
    llm.generate([BASE[:40], BASE[:40]], greedy(2))
    llm.generate([BASE[:40]], greedy(2))
    assert llm.engine.stats.shared_tokens == 0 and llm.engine.pool.cached == 0


class OfLength(RandomRouter):
    """Its answer depends on how long the prompt is."""

    features = ("distance_to_prompt_end",)

    @property
    def depends_on(self) -> Any:
        return frozenset({"tokens", "prompt_length"})

    def route(self, inputs: Any) -> Any:
        answer = super().route(inputs)
        is_high_T = inputs.feature("distance_to_prompt_end") % 3 == 0
        return type(answer)(
            route_T=(~is_high_T).long(),
            score_T=answer.score_T,
            reason_T=answer.reason_T,
            reasons=answer.reasons,
        )


def test_decisions_that_look_at_the_prompts_length_are_shared_at_that_length_only() -> None:
    """The end of a short prompt, high in its own request, taken over into the middle of a long one."""
    first, second = (Watched(make(None, OfLength(0.5))) for make in (warm, cold))
    forced = prompts(seed=5)[4][:10]
    for name, length, shared in (("a", 60, 0), ("b", 60, 56), ("c", 80, 0), ("d", 80, 72)):
        assert first.run(name, BASE[:length], forced) == shared
        second.run(name, BASE[:length], forced)
        assert_same(first, second, name)


def test_requests_on_different_paths_do_not_share() -> None:
    """Entries of a request that ran low, read by one that runs high."""
    router = RequestLevelRouter(RandomRouter(0.5), high_frac=0.5)
    llm, lonely = (make(None, router) for make in (warm, cold))
    first, second = Watched(llm), Watched(lonely)
    prompts_of = {str(i): (*BASE[:32], *prompts()[i + 3][:20]) for i in range(12)}
    for name, prompt in prompts_of.items():
        first.run(name, prompt, prompt[:10])
        second.run(name, prompt, prompt[:10])
        assert_same(first, second, name)
    chosen = {int(r.requested_N[0]) for r in first.requests.values()}
    assert chosen == {0, 1} and llm.engine.stats.shared_tokens >= 10 * 32 - 64


def test_another_router_version_starts_anew() -> None:
    """Entries that were computed on routes which the router would not choose any more; a prompt whose decisions are of
    two versions, left to others."""
    router = RandomRouter(0.5)
    llm = warm(None, router, max_num_batched_tokens=16, max_num_seqs=4)
    (before,) = llm.generate([BASE[:40]], greedy(5))
    router.seed = 1
    watched = Watched(llm)
    assert watched.run("new", BASE[:40], BASE[:5]) == 0
    assert watched.run("new again", BASE[:40], BASE[:5]) == 32
    expected = Watched(cold(None, RandomRouter(0.5, seed=1)))
    expected.run("new", BASE[:40], BASE[:5])
    assert_same(watched, expected, "new")
    assert_same(watched, expected, "new again", "new")
    router.seed = 2
    watched.add("mixed", BASE[:40], BASE[:5])
    llm.engine.step()
    router.seed = 3
    run_all(llm)
    assert watched.run("after", BASE[:40], BASE[:5]) == 0
    assert len(tokens(before)) == 5


def test_logits_of_every_position_are_computed() -> None:
    """prompt_logprobs with holes where the prompt was cached."""
    llm = warm(None)
    params = greedy(2, prompt_logprobs=0)
    (first,), (again,) = (llm.generate([BASE[:40]], params) for _ in range(2))
    assert llm.engine.stats.shared_tokens == 0
    assert first.prompt_logprobs == again.prompt_logprobs
    assert again.prompt_logprobs is not None and None not in again.prompt_logprobs[1:]
    llm.generate([BASE[:40]], greedy(2))
    assert llm.engine.stats.shared_tokens == 32


def test_the_rule_router_shares_among_prompts_of_one_length() -> None:
    """The default rule looks at the distance to the prompt's end: what depends on it must be in the key."""
    llm = warm(None, RuleRouter())
    for prompt in (BASE[:70], BASE[:70], BASE[:66]):
        llm.generate([prompt], greedy(2))
    looks = "prompt_length" in llm.router.depends_on
    assert llm.engine.stats.shared_tokens == (64 if looks else 128)


def test_what_cannot_work_together_is_refused() -> None:
    """Entries rewritten in int8 under the eyes of others."""
    retention = RetentionOptions(policy=SinkWindow(), compress="old")
    with pytest.raises(
        ValueError, match=r"retention\.compress rewrites entries that prefix_sharing"
    ):
        EngineOptions(retention=retention, prefix_sharing=True)
    with pytest.raises(ValueError, match="prefix_block"):
        EngineOptions(prefix_block=0)
