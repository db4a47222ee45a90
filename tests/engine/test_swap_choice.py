"""Guards the choice between swap and recompute, and the counters that say what was chosen."""

import math
from typing import Any

import pytest

from tests.engine.tools import greedy, prompts, tiny
from tokenrouter import LLM, EngineOptions
from tokenrouter.evaluation.metrics import serving_sections
from tokenrouter.evaluation.throughput import Repeat, run_requests
from tokenrouter.executors import build_pool
from tokenrouter.kvcache import HostTier, Swapped
from tokenrouter.kvcache.host import SwapCost
from tokenrouter.workloads import RequestSpec

REQUESTS = [RequestSpec(prompt_ids=prompt, params=greedy(40)) for prompt in prompts()[:24]]


def engine(**options: Any) -> LLM:
    """With fewer slots than its requests need."""
    executors = build_pool("full", tiny(), kernels="native")
    options = {"num_kv_slots": 140, "max_num_seqs": 24} | options
    return LLM(tiny(), executors=executors, options=EngineOptions(**options))


def host_of(llm: LLM) -> HostTier:
    host = llm.engine.scheduler.host
    assert host is not None
    return host


def with_host(recompute_s: float, num_host_slots: int = 4000) -> LLM:
    llm = engine(num_host_slots=num_host_slots)
    host_of(llm).recompute_s = recompute_s
    return llm


def preemption(llm: LLM, repeat: Repeat) -> dict[str, int]:
    """What metrics.json says, after a check against the engine's own counters."""
    section = serving_sections(llm, [repeat])["kv"]
    found: dict[str, int] = section["preemption"]
    assert found["preemptions"] == repeat.stats.num_preemptions > 3
    assert found["preemptions"] == found["swaps_out"] + found["recomputes"]
    assert found["preemptions"] == sum(step["num_preemptions"] for step in repeat.steps)
    return found


def test_without_a_host_tier_every_preemption_recomputes() -> None:
    """Preemptions stood in no metrics.json, so a run under pressure looked like one without."""
    llm = engine()
    repeat = run_requests(llm, REQUESTS)
    found = preemption(llm, repeat)
    assert found["recomputes"] == found["preemptions"] and found["swaps_in"] == 0
    computed = repeat.stats.prefill_tokens + repeat.stats.decode_tokens
    needed = sum(len(r.prompt_ids) + 39 for r in REQUESTS)
    assert found["recomputed_tokens"] == computed - needed > 0
    assert "host" not in serving_sections(llm, [repeat])["kv"]


def test_an_infinite_cost_of_recompute_swaps_always() -> None:
    """A request that is counted as swapped and computed again all the same."""
    llm = with_host(math.inf)
    repeat = run_requests(llm, REQUESTS)
    found = preemption(llm, repeat)
    assert found["recomputes"] == found["recomputed_tokens"] == 0
    assert found["swaps_in"] == found["swaps_out"] == found["preemptions"]
    host = serving_sections(llm, [repeat])["kv"]["host"]
    assert host["peak_entries"] == host_of(llm).peak_live > 0 and host["copy_ms"] > 0.0
    assert host["peak_bytes"] == host["peak_entries"] * llm.engine.kv_bytes_per_slot


def test_a_recompute_for_nothing_never_swaps() -> None:
    """A tier that copies whatever there is room for."""
    llm = with_host(0.0)
    found = preemption(llm, run_requests(llm, REQUESTS))
    assert found["swaps_out"] == 0 and found["recomputed_tokens"] > 0


def test_each_request_goes_the_cheaper_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """One choice for all: a copy costs here as much as 50 tokens do, whatever the request."""
    llm = with_host(0.02)
    host = host_of(llm)
    host._cost = SwapCost(fixed_s=1.0, entry_s=0.0)
    chosen: list[tuple[int, bool]] = []
    swap_out = host.swap_out

    def record(row: int, num_seen: int) -> Swapped | None:
        swapped = swap_out(row, num_seen)
        chosen.append((num_seen, swapped is not None))
        return swapped

    monkeypatch.setattr(host, "swap_out", record)
    found = preemption(llm, run_requests(llm, REQUESTS))
    assert found["swaps_out"] > 0 and found["recomputes"] > 0
    assert all(is_swapped is (num_seen >= 50) for num_seen, is_swapped in chosen)


def test_a_full_host_tier_counts_as_recompute() -> None:
    """Preemptions that found no room were neither swaps nor anything else."""
    llm = with_host(math.inf, num_host_slots=60)
    repeat = run_requests(llm, REQUESTS)
    found = preemption(llm, repeat)
    assert found["swaps_out"] > 0 and found["recomputes"] > 0
    assert serving_sections(llm, [repeat])["kv"]["host"]["peak_entries"] <= 60


def test_a_pass_counts_its_own_swaps() -> None:
    """The host tier's counters went on from pass to pass, and changed in what was measured before."""
    llm = with_host(math.inf)
    first, second = run_requests(llm, REQUESTS), run_requests(llm, REQUESTS)
    assert first.stats.swaps is not second.stats.swaps
    assert first.stats.swaps.num_out == first.stats.num_preemptions
    assert second.stats.swaps.num_out == second.stats.num_preemptions
    llm.engine.stats.reset()
    assert host_of(llm).counts.num_out == 0 and second.stats.swaps.num_out > 0
