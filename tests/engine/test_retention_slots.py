"""Guards the slots and rows of requests that evict: free at once, given to others, and nothing old to be seen in them.

N entries of a request, R rows of the pool.
"""

import numpy as np
import pytest
import torch

from tests.engine.retention_cases import INTERVAL, every_policy, options
from tests.engine.tools import greedy, prompts, run_all, tiny, tokens, twin
from tests.engine.watched import Watched, assert_same
from tokenrouter import LLM, EngineOptions
from tokenrouter.kvcache import compaction
from tokenrouter.kvcache.retention import (
    Full,
    HeavyHitter,
    RetentionOptions,
    RouteClass,
    SinkWindow,
)
from tokenrouter.models import Decoder
from tokenrouter.routers import RandomRouter
from tokenrouter.scheduler import Request
from tokenrouter.scheduler.request import NEVER
from tokenrouter.types import ForwardBatch


def poison(llm: LLM) -> None:
    """Fills every slot that no request uses with NaN."""
    table = llm.engine.pool.tables[0]
    rows = [r.row for r in llm.engine.scheduler.running]
    used_S = np.zeros(llm.engine.pool.num_slots, np.bool_)
    for row in rows:
        used_S[table.slots_RN[row, : table.num_kept_R[row]]] = True
    llm.engine._parts.arena.kv_LSPD[:, torch.from_numpy(np.flatnonzero(~used_S))] = float("nan")


@every_policy
def test_slots_are_free_in_the_step_that_evicts_them_and_reuse_shows_nothing_old(
    retention: RetentionOptions,
) -> None:
    """Freed a step late, or an entry's old content read through a recycled slot: freed slots are filled with NaN."""
    cases = {str(i): (p, prompts(seed=5)[i][:30]) for i, p in enumerate(prompts()[:10])}
    alone = Watched(LLM(tiny(), options=options(retention, max_num_seqs=1)))
    alone.serve(cases)
    tight = Watched(LLM(tiny(), options=options(retention, num_kv_slots=124, max_num_seqs=6)))
    engine, num_checked = tight.llm.engine, 0

    def check() -> None:
        nonlocal num_checked
        kept = 0
        for request in engine.scheduler.running:
            at_GN = request.evicted_at_GN
            assert at_GN is not None
            num_gone = int((at_GN[0] != NEVER).sum())
            assert not num_gone or at_GN[0].min() >= INTERVAL
            kept += request.num_computed - num_gone
            num_checked += num_gone > 0
        assert engine.pool.free == engine.pool.num_slots - kept
        poison(tight.llm)

    tight.serve(cases, check)
    assert num_checked > 50
    assert sum(assert_same(tight, alone, name) for name in cases) > 100


def row_state(llm: LLM, request: Request) -> list[np.ndarray]:
    """All that a request's row says of it, and what the policy will go by."""
    table, row = llm.engine.pool.tables[0], request.row
    kept = int(table.num_kept_R[row])
    at_GN, statistics = request.evicted_at_GN, request.statistics or []
    assert at_GN is not None
    counts, positions_N = (
        [kept, table.num_seen_R[row], table.num_adopted_R[row]],
        table.positions_RN[row, :kept].copy(),
    )
    windows = [
        part.copy().close_window(torch.from_numpy(positions_N), 0, kept) for part in statistics
    ]
    received = [x_N.numpy() for window in windows for x_N in window]
    return [np.array(counts), positions_N, at_GN.copy(), *received]


@every_policy
def test_a_recycled_row_has_no_mask_positions_evictions_or_statistics_of_its_former_owner(
    retention: RetentionOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks left in a recycled row: the new request misses what the old one evicted, or is judged by its attention."""
    seen: list[ForwardBatch] = []
    forward = Decoder.forward

    def spy(self: Decoder, batch: ForwardBatch, *args: object) -> torch.Tensor:
        seen.append(batch)
        return forward(self, batch, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "forward", spy)
    used, fresh = (
        Watched(LLM(tiny(), options=options(retention, max_num_seqs=1, num_kv_slots=124)))
        for _ in range(2)
    )
    used.add("former", prompts()[2], prompts(seed=5)[2][:30])
    used.llm.engine.step()
    row = used.requests["former"].row
    run_all(used.llm)
    assert used.num_evicted("former") > 10
    for watched in (used, fresh):
        watched.add("new", prompts(seed=5)[2], prompts()[2][:10])
        seen.clear()
        for step in range(1, 7):
            watched.llm.engine.step()
            (access,) = seen[step - 1].kv
            if step == 1:
                assert access.attention.positions_RN is None, "an eviction of nobody"
                assert int(access.attention.query_start_B) == 0
                assert int(access.attention.num_keys_B) == len(seen[0]) == INTERVAL
    new = used.requests["new"]
    assert new.row == row
    for ours, theirs in zip(
        row_state(used.llm, new), row_state(fresh.llm, fresh.requests["new"]), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


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
