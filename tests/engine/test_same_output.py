"""Guards greedy outputs against everything that must not change them: company, chunks, dispatch, scheduling, memory."""

import numpy as np
import pytest
import torch

from tests.engine.tools import (
    NearTies,
    alone,
    greedy,
    plain_llm,
    prompts,
    routes,
    run_all,
    tiny,
    tiny_pair,
    tokens,
    twin,
)
from tokenrouter import LLM, EngineOptions
from tokenrouter.executors import build_pool
from tokenrouter.routers import RandomRouter


def check_all(llm: LLM) -> None:
    """All prompts at once through ``llm`` equal the outputs alone, up to a near-tie or two."""
    outputs = llm.generate(prompts(), greedy())
    ties = NearTies(plain_llm())
    for prompt, expected, output in zip(prompts(), alone(), outputs, strict=True):
        ties.same(prompt, expected, tokens(output))
    assert ties.count <= 2
    assert llm.engine.pool.free == llm.engine.pool.num_slots
    llm.engine.pool.check_integrity()


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_alone_equals_transformers(backend: str) -> None:
    """Guards the yardstick of this file: greedy decoding itself, whatever computes it."""
    model, hf_model = tiny_pair()
    llm = LLM(model, executors=build_pool("full", model, kernels=backend))
    for prompt in prompts()[:6]:
        expected = tokens(llm.generate([prompt], greedy())[0])
        with torch.inference_mode():
            logits_TV = hf_model(torch.tensor([[*prompt, *expected]])).logits[0]
        best = logits_TV[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert tuple(best) == expected
    assert alone()[:6] == tuple(tokens(llm.generate([p], greedy())[0]) for p in prompts()[:6])


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens"),
    [(1, 1), (1, 7), (8, 8), (8, 20), (8, 512), (64, 64), (64, 100), (64, 2048)],
)
@pytest.mark.parametrize("scheduler", ["fcfs", "static_batch"])
def test_batches_and_chunks(max_num_seqs: int, max_num_batched_tokens: int, scheduler: str) -> None:
    """A chunk that starts at a wrong position, a row mixed up with its neighbour's, a mask off by one."""
    check_all(
        plain_llm(
            EngineOptions(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                scheduler=scheduler,  # type: ignore[arg-type]
                static_batch_size=max_num_seqs,
            )
        )
    )


@pytest.mark.parametrize("num_kv_slots", [102, 130, 200])
@pytest.mark.parametrize("scheduler", ["fcfs", "static_batch"])
def test_preemption(num_kv_slots: int, scheduler: str) -> None:
    """A recompute that starts at a wrong token, samples twice, or keeps slots of its former life."""
    llm = plain_llm(
        EngineOptions(
            max_num_seqs=16,
            max_num_batched_tokens=64,
            num_kv_slots=num_kv_slots,
            scheduler=scheduler,  # type: ignore[arg-type]
        )
    )
    check_all(llm)
    assert llm.engine.stats.num_preemptions > 0, "the pool was too large to test anything"


def test_fragmented_slots() -> None:
    """Requests whose slots no longer lie in a row are gathered; mixed with those read in place."""
    llm = plain_llm(EngineOptions(max_num_seqs=6, max_num_batched_tokens=64, num_kv_slots=300))
    for index, prompt in enumerate(prompts()):
        llm.engine.add_request(str(index), prompt, greedy())
    scattered = 0

    def count() -> None:
        nonlocal scattered
        rows = [r.row for r in llm.engine.scheduler.running]
        table = llm.engine.pool.tables[0]
        slots = [table.slots_RN[row, : table.num_kept_R[row]] for row in rows]
        scattered += sum(bool((np.diff(slots_N) != 1).any()) for slots_N in slots)

    last = run_all(llm, count)
    ties = NearTies(plain_llm())
    for index, (prompt, expected) in enumerate(zip(prompts(), alone(), strict=True)):
        ties.same(prompt, expected, tokens(last[str(index)]))
    assert ties.count <= 2
    assert scattered > 0, "every request had its slots in a row: nothing was tested"


@pytest.mark.parametrize("dispatch", ["mixed", "queued", "auto"])
def test_dispatch_with_one_path(dispatch: str) -> None:
    """A pool of one path that waits for company that cannot come."""
    check_all(plain_llm(EngineOptions(dispatch=dispatch, max_num_batched_tokens=64)))  # type: ignore[arg-type]


ROUTED = {
    "alone": EngineOptions(max_num_seqs=1, max_num_batched_tokens=128),
    "mixed": EngineOptions(dispatch="mixed", max_num_batched_tokens=64),
    "queued": EngineOptions(dispatch="queued", max_num_batched_tokens=64),
    "queued, long waits": EngineOptions(dispatch="queued", min_batch=9, max_wait_steps=11),
    "queued, no wait": EngineOptions(dispatch="queued", max_wait_steps=0),
    "auto": EngineOptions(dispatch="auto", max_num_batched_tokens=64),
    "static": EngineOptions(scheduler="static_batch", dispatch="queued", min_batch=2),
    "preempted": EngineOptions(
        dispatch="queued", num_kv_slots=130, max_num_batched_tokens=64, min_batch=3
    ),
    "small chunks": EngineOptions(dispatch="mixed", max_num_seqs=5, max_num_batched_tokens=5),
}


def test_two_paths_in_every_mode() -> None:
    """A mode that changes a route, a row or the order of tokens; a waiting token that is lost or doubled."""
    results = {}
    for name, options in ROUTED.items():
        llm = LLM(tiny(), router=RandomRouter(0.4), executors=twin(), options=options)
        results[name] = llm.generate(prompts()[:40], greedy(10))
        assert llm.engine.pool.free == llm.engine.pool.num_slots
        stats = llm.engine.stats
        assert (stats.num_preemptions > 0) == (name == "preempted")
        assert stats.executed_tokens.sum(0).min() > 100, "both routes must be used"
    reference = results.pop("alone")
    llm = LLM(tiny(), router=RandomRouter(0.4), executors=twin())
    ties = NearTies(llm)
    for name, outputs in results.items():
        for prompt, expected, output in zip(prompts(), reference, outputs, strict=False):
            ties.same(prompt, tokens(expected), tokens(output))
            if tokens(expected) == tokens(output):
                assert routes(expected) == routes(output), name
    assert ties.count <= 2
