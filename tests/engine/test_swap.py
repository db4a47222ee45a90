"""Guards preemption by swap: requests that come back from the host tier go on bit for bit where they were."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.tools import greedy, prompts, run_all, tiny, tokens
from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.executors import build_pool
from tokenrouter.kvcache import HostTier, Swapped
from tokenrouter.kvcache.retention import Full, HeavyHitter, RetentionOptions
from tokenrouter.scheduler import POLICIES, Request

RETENTION = RetentionOptions(policy=HeavyHitter(evicted_frac=0.3), interval=8, window=4, recent=3)
CONVERTS = RetentionOptions(policy=Full(), interval=8, window=4, recent=3, compress="old")
FORMS: dict[str, dict[str, Any]] = {
    "full": {},
    "int8": {"kv_cache_dtype": "int8"},
    "evicting": {"retention": RETENTION},
    "converting": {"retention": CONVERTS},
    "int8, evicting": {"kv_cache_dtype": "int8", "retention": RETENTION},
    "converting, evicting": {"retention": replace(RETENTION, compress="old")},
    "groups, evicting": {"retention": replace(RETENTION, groups=2)},
}
every_form = pytest.mark.parametrize("form", FORMS)


def engine(**options: Any) -> LLM:
    executors = build_pool("full", tiny(), kernels="native")
    return LLM(tiny(), executors=executors, options=EngineOptions(**options))


def host_of(llm: LLM) -> HostTier:
    host = llm.engine.scheduler.host
    assert host is not None
    return host


def always_swap(llm: LLM) -> None:
    """A tiny model is computed again faster than anything is measured."""
    host_of(llm)._recompute_s = float("inf")


@every_form
@pytest.mark.parametrize("scheduler", ["fcfs", "shortest_first", "static_batch"])
def test_swapping_under_load_changes_no_output(form: str, scheduler: str) -> None:
    """A token computed twice or not at all, entries of another request, statistics that start anew."""
    options = FORMS[form] | {"max_num_batched_tokens": 64, "max_num_seqs": 24}
    many = {
        "scheduler": scheduler,
        "static_batch_size": 24 if scheduler == "static_batch" else None,
    }
    expected = [tokens(o) for o in engine(**options).generate(prompts()[:24], greedy(40))]
    llm = engine(**options, **many, num_kv_slots=140, num_host_slots=4000)
    always_swap(llm)
    host = host_of(llm)
    for index, prompt in enumerate(prompts()[:24]):
        llm.engine.add_request(str(index), prompt, greedy(40))

    def check() -> None:
        held = [r.swapped.num_entries for r in llm.engine.scheduler.waiting if r.swapped]
        assert host.live == sum(held) and host.free + host.live == host.num_slots

    last = run_all(llm, check)
    assert llm.engine.stats.num_preemptions > 3 and host.peak_live > 100
    assert llm.engine.stats.reused_tokens == 0, "a swapped token ran again"
    assert host.live == 0
    differing = sum(tokens(last[str(i)]) != expected[i] for i in range(24))
    assert differing <= 1  # near-ties: other company in a step


class Luggage:
    """Copies what a request has when it is swapped out, and compares when it is back: entries, positions, statistics.

    Args:
        llm: with a host tier.
    """

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.engine
        self._host = host_of(llm)
        self._left: dict[int, list[Tensor]] = {}
        self.num_compared = 0
        self._swap_out, self._swap_in = self._host.swap_out, self._host.swap_in
        self._host.swap_out = self.swap_out  # type: ignore[method-assign]
        self._host.swap_in = self.swap_in  # type: ignore[method-assign]

    def swap_out(self, row: int, num_seen: int) -> Swapped | None:
        """As the host tier's own."""
        owned = self.content(row, num_seen)
        swapped = self._swap_out(row, num_seen)
        if swapped is not None:
            self._left[id(swapped)] = owned
        return swapped

    def swap_in(self, swapped: Swapped, row: int) -> None:
        """As the host tier's own."""
        self._swap_in(swapped, row)
        owned = self._left.pop(id(swapped))
        assert all(map(torch.equal, owned, self.content(row, swapped.num_seen)))
        self.num_compared += 1

    def content(self, row: int, num_seen: int) -> list[Tensor]:
        """Positions and forms of a row's first entries in every group, and what they hold in every layer of it."""
        arena, found = self._engine._parts.arena, []
        per_group = len(arena.layers) // len(self._engine.pool.tables)
        for group, table in enumerate(self._engine.pool.tables):
            positions_N = table.positions_RN[row, : table.num_kept_R[row]]
            kept = int((positions_N < num_seen).sum())
            slots_N = torch.from_numpy(table.slots_RN[row, :kept].copy())
            found += [torch.from_numpy(positions_N[:kept].copy()), arena.is_int8(slots_N)]
            for layer in range(group * per_group, (group + 1) * per_group):
                full, int8 = arena.read(layer, slots_N)
                found += [full, *int8]
        return found


@every_form
def test_entries_swapped_under_load_come_back_bit_for_bit(form: str) -> None:
    """Entries rounded, shifted or exchanged on their way, below what any token shows; slots are filled with NaN between
    two owners."""
    options = FORMS[form] | {"max_num_batched_tokens": 64, "max_num_seqs": 24}
    llm = engine(**options, num_kv_slots=140, num_host_slots=4000)
    always_swap(llm)
    luggage, arena = Luggage(llm), llm.engine._parts.arena
    for index, prompt in enumerate(prompts()[:24]):
        llm.engine.add_request(str(index), prompt, greedy(40))

    def poison() -> None:
        """Slots that no group uses; int8 slots have a scale for that."""
        users = [table.slots._users_S for table in llm.engine.pool.tables]
        unused_S = torch.from_numpy(sum(users) == 0)
        null = arena.null_slot
        arena.kv_LSPD[:, :null][:, unused_S[:null]] = float("nan")
        for _, scale_SP in arena.int8 or ():
            scale_SP[unused_S[null + 1 :][: len(scale_SP)]] = float("nan")

    run_all(llm, poison)
    assert luggage.num_compared > 3 and llm.engine.stats.reused_tokens == 0
    assert not luggage._left


@every_form
def test_logits_after_a_swap_are_bit_equal(form: str) -> None:
    """Entries, statistics or evictions that are not what they were: alone, so that company does not matter."""
    results: list[list[Tensor]] = []
    for swaps in (False, True):
        llm = engine(**FORMS[form], max_num_seqs=1, num_host_slots=500)
        always_swap(llm)
        rows: list[Tensor] = []
        llm.engine.add_request(
            "a",
            prompts()[2],
            SamplingParams(),
            forced_ids=list(range(5, 45)),
            logits_sink=lambda _, logits_RV, rows=rows: rows.append(logits_RV.clone()),
        )
        steps = 0
        while llm.engine.has_unfinished():
            llm.engine.step()
            steps += 1
            running = llm.engine.scheduler.running
            if swaps and steps % 5 == 0 and running:
                preempt(llm, running[0])
        results.append(rows)
        assert (llm.engine.stats.evicted_entries > 20) == ("evicting" in form)
    assert len(results[0]) == len(results[1]) == 41
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def preempt(llm: LLM, request: Request) -> None:
    scheduler = llm.engine.scheduler
    scheduler._preempt(request)  # type: ignore[attr-defined]
    assert request.swapped is not None
    scheduler.waiting.insert(0, request)


def test_an_aborted_request_leaves_the_host_tier() -> None:
    """Room that is never given back, until nothing can be swapped any more."""
    llm = engine(max_num_seqs=4, num_host_slots=500)
    always_swap(llm)
    for index in range(3):
        llm.engine.add_request(str(index), prompts()[index], greedy(20))
    llm.engine.step()
    preempt(llm, llm.engine.scheduler.running[-1])
    assert host_of(llm).live > 0
    for index in range(3):
        llm.engine.abort(str(index))
    assert host_of(llm).live == 0 and llm.engine.pool.live == 0


@pytest.mark.parametrize("scheduler", sorted(POLICIES))
def test_every_policy_gives_the_host_tier_back_what_an_abort_leaves(scheduler: str) -> None:
    """A policy with a ``finish`` of its own that forgets the entries of a waiting request."""
    llm = engine(
        scheduler=scheduler,
        static_batch_size=8 if scheduler == "static_batch" else None,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_kv_slots=140,
        num_host_slots=4000,
    )
    always_swap(llm)
    for index, prompt in enumerate(prompts()[3:11]):
        llm.engine.add_request(str(index), prompt, greedy(40))
    swapped: list[Request] = []
    while not swapped:
        llm.engine.step()
        swapped = [r for r in llm.engine.scheduler.waiting if r.swapped]
    for request in swapped:
        llm.engine.abort(request.request_id)
    run_all(llm)
    assert host_of(llm).live == 0


def test_a_full_host_tier_recomputes() -> None:
    """A request that is lost, or waits for room on the host, where it could be computed again."""
    llm = engine(num_kv_slots=140, num_host_slots=10, max_num_seqs=24)
    always_swap(llm)
    outputs = [tokens(o) for o in llm.generate(prompts()[:24], greedy(40))]
    assert llm.engine.stats.reused_tokens > 0
    expected = [tokens(o) for o in engine().generate(prompts()[:24], greedy(40))]
    assert sum(a != b for a, b in zip(outputs, expected, strict=True)) <= 1


def test_a_token_from_the_host_tier_holds_no_other_back() -> None:
    """With prompts first, one request that comes back ran alone, and all that decode beside it stood still."""
    llm = engine(phase_order="prefill_first", max_num_seqs=8, num_kv_slots=140, num_host_slots=4000)
    always_swap(llm)
    scheduler = llm.engine.scheduler
    for index, prompt in enumerate(prompts()[:16]):
        llm.engine.add_request(str(index), prompt, greedy(40))
    num_checked = 0
    while llm.engine.has_unfinished():
        decoding = [r for r in scheduler.running if r.decoding]
        preempted = llm.engine.stats.num_preemptions
        before = {r: r.num_computed for r in decoding}
        prefilled = {r: r.num_computed for r in scheduler.running + scheduler.waiting}
        llm.engine.step()
        is_decode_only = all(
            r.num_computed - n <= 1 or r.num_computed == 0 for r, n in prefilled.items()
        )
        if is_decode_only and preempted == llm.engine.stats.num_preemptions:
            ran = [r for r in decoding if r.finished or r.num_computed > before[r]]
            assert not ran or len(ran) == len(decoding)
            came_back = [
                r for r in prefilled if r not in decoding and r.num_computed > prefilled[r]
            ]
            assert not (came_back and decoding) or ran
            num_checked += bool(ran)
    assert num_checked > 20 and llm.engine.stats.num_preemptions > 0
