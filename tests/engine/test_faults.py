"""Guards against exceptions in a step: they reach the caller, and the step can be tried again."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.faults import failing, step_to_the_end
from tests.engine.tools import alone, greedy, plain_llm, prompts, run_all, tiny, tokens, twin
from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.executors import build_pool
from tokenrouter.routers import RandomRouter


@pytest.mark.parametrize("method", ["qkv", "finish_layer", "logits"])
@pytest.mark.parametrize("first", [1, 2, 30])
def test_a_failed_forward_can_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, method: str, first: int
) -> None:
    """A token taken twice or lost; KV written by half a forward and then trusted; an admission undone."""
    pool = build_pool("full", tiny())
    llm = LLM(
        tiny(),
        executors=pool,
        options=EngineOptions(max_num_batched_tokens=40, num_kv_slots=150),
    )
    executor = pool.executors["high"]
    at = {first, first + 7, first + 8, first + 40}
    monkeypatch.setattr(executor, method, failing(getattr(executor, method), at=at))
    for index, prompt in enumerate(prompts()[:12]):
        llm.engine.add_request(str(index), prompt, greedy())
    last, failures = step_to_the_end(llm)
    assert failures == len(at)
    assert [tokens(last[str(i)]) for i in range(12)] == list(alone()[:12])


@pytest.mark.parametrize("dispatch", ["mixed", "queued"])
def test_a_failure_in_the_second_forward_of_a_step(
    monkeypatch: pytest.MonkeyPatch, dispatch: str
) -> None:
    """The first forward's tokens are accepted although the step failed, or never again."""
    pool = twin()
    options = EngineOptions(dispatch=dispatch, max_num_batched_tokens=64, min_batch=2)  # type: ignore[arg-type]
    router = RandomRouter(0.5)
    expected = LLM(tiny(), router=router, executors=pool, options=options).generate(
        prompts()[:10], greedy()
    )
    llm = LLM(tiny(), router=router, executors=pool, options=options)
    low = pool.executors["low"]
    monkeypatch.setattr(low, "finish_layer", failing(low.finish_layer, at={5, 17, 18, 60}))
    for index, prompt in enumerate(prompts()[:10]):
        llm.engine.add_request(str(index), prompt, greedy())
    last, failures = step_to_the_end(llm)
    assert failures == 4
    assert [tokens(last[str(i)]) for i in range(10)] == [tokens(o) for o in expected]


def test_the_exception_reaches_the_caller_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A swallowed error with empty outputs; requests of the failed call that run in the next one."""
    pool = build_pool("full", tiny())
    llm = LLM(tiny(), executors=pool)
    executor = pool.executors["high"]
    monkeypatch.setattr(executor, "finish_layer", failing(executor.finish_layer, at={30}))
    with pytest.raises(RuntimeError, match="injected"):
        llm.generate(prompts()[:6], greedy())
    assert not llm.engine.has_unfinished()
    assert llm.engine.pool.free == llm.engine.pool.num_slots
    outputs = llm.generate(prompts()[:6], greedy())
    assert tuple(map(tokens, outputs)) == alone()[:6]


def test_nan_logits_are_an_error_and_not_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """argmax of NaN is a valid id: a broken kernel would show as bad text."""
    pool = build_pool("full", tiny())
    llm = LLM(tiny(), executors=pool)
    executor = pool.executors["high"]
    real, count = executor.logits, 0

    def broken(hidden_TE: Tensor) -> Tensor:
        nonlocal count
        count += 1
        logits_TV = real(hidden_TE).clone()
        if count == 3:
            logits_TV[1] = float("nan")
        return logits_TV

    monkeypatch.setattr(executor, "logits", broken)
    for index, prompt in enumerate(prompts()[:4]):
        llm.engine.add_request(str(index), prompt, greedy())
    llm.engine.step()
    llm.engine.step()
    with pytest.raises(RuntimeError, match="row 1"):
        llm.engine.step()
    last = run_all(llm)
    assert [tokens(last[str(i)]) for i in range(4)] == list(alone()[:4])


def test_a_sink_that_raises_leaves_the_other_requests_alone() -> None:
    """The others had their tokens computed but not appended: they would never run again."""
    llm = plain_llm()
    got: list[int] = []

    def sink(position: int, logits_TV: Tensor) -> None:
        if position == 6 and len(got) < 10:
            got.extend([-1] * 10)
            raise RuntimeError("injected")
        got.append(position)

    llm.engine.add_request("b", prompts()[3], greedy())
    llm.engine.add_request(
        "a", [5, 6, 7], SamplingParams(), forced_ids=list(range(10, 20)), logits_sink=sink
    )
    llm.engine.add_request("c", prompts()[4], greedy())
    last, failures = step_to_the_end(llm)
    assert failures == 1
    assert [position for position in got if position >= 0] == list(range(2, 13))
    assert (tokens(last["b"]), tokens(last["c"])) == (alone()[3], alone()[4])


def test_a_router_that_raises_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions half recorded: the second attempt must decide the same tokens again."""
    router = RandomRouter(0.5)
    expected = LLM(tiny(), router=router, executors=twin()).generate(prompts()[:6], greedy())
    llm = LLM(tiny(), router=router, executors=twin())
    monkeypatch.setattr(router, "route", failing(router.route, at={1, 4, 5}))
    for index, prompt in enumerate(prompts()[:6]):
        llm.engine.add_request(str(index), prompt, greedy())
    last, failures = step_to_the_end(llm)
    assert failures == 3
    for index, one in enumerate(expected):
        assert tokens(last[str(index)]) == tokens(one)
        assert last[str(index)].outputs[0].routes == one.outputs[0].routes


def test_a_seeded_draw_that_is_tried_again_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed step that uses up a seeded request's numbers: the seed no longer says what it draws."""
    params = SamplingParams(seed=5, n=2, temperature=2.0, max_tokens=9, ignore_eos=True)
    expected = plain_llm().generate(prompts()[:4], params)
    llm = plain_llm()
    sampler = llm.engine._parts.sampler
    real, count = sampler.sample, 0

    def drawn_and_lost(*args: Any) -> Any:
        nonlocal count
        count += 1
        sampled = real(*args)
        if count in {1, 4, 5}:
            raise RuntimeError("injected")
        return sampled

    monkeypatch.setattr(sampler, "sample", drawn_and_lost)
    for index, prompt in enumerate(prompts()[:4]):
        llm.engine.add_request(str(index), prompt, params)
    last, failures = step_to_the_end(llm)
    assert failures == 3
    for index, one in enumerate(expected):
        got = last[str(index)].outputs
        assert [c.token_ids for c in got] == [c.token_ids for c in one.outputs]


def test_a_router_that_fails_to_hear_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs of a step that is done are lost, those of requests that ended in it for ever."""
    router = RandomRouter(0.5)
    expected = LLM(tiny(), router=router, executors=twin()).generate(prompts()[:6], greedy())
    llm = LLM(tiny(), router=router, executors=twin())
    monkeypatch.setattr(router, "observe", failing(router.observe, at={1, 4, 5, 12, 13}))
    for index, prompt in enumerate(prompts()[:6]):
        llm.engine.add_request(str(index), prompt, greedy())
    last, failures = step_to_the_end(llm)
    assert failures == 4, "the last step is the twelfth, and the one that hands back runs nothing"
    assert [tokens(last[str(i)]) for i in range(6)] == [tokens(one) for one in expected]


def test_what_a_failed_run_left_is_not_handed_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that a raising ``observe`` kept back come out of an engine whose requests were all aborted."""
    router = RandomRouter(0.5)
    llm = LLM(tiny(), router=router, executors=twin())
    monkeypatch.setattr(router, "observe", failing(router.observe, at={3, 12}))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="injected"):
            llm.generate(prompts()[:6], greedy(9))
        assert not llm.engine.has_unfinished()
    assert len(llm.generate(prompts()[:6], greedy(9))) == 6


@pytest.mark.parametrize("num_kv_slots", [None, 120])
@pytest.mark.parametrize("dispatch", ["mixed", "queued"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_nan_in_every_slot_without_a_computed_token_changes_nothing(
    family: str, dispatch: str, num_kv_slots: int | None
) -> None:
    """Attention that reads freed, promised or not yet written slots and masks them: NaN times 0 is NaN."""
    model = tiny(family)
    options = EngineOptions(
        dispatch=dispatch,  # type: ignore[arg-type]
        num_kv_slots=num_kv_slots,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        min_batch=3,
    )
    pool = twin() if family == "llama" else build_pool("full", model)
    router = RandomRouter(0.5) if family == "llama" else "all_high"
    expected = LLM(model, router=router, executors=pool, options=options)
    llm = LLM(model, router=router, executors=pool, options=options)
    arena = llm.engine._parts.arena

    def poison() -> None:
        used = [
            torch.from_numpy(llm.engine.pool.tables[0].slots_RN[r.row, : r.num_computed])
            for r in llm.engine.scheduler.running
            if r.row >= 0
        ]
        empty_S = torch.ones(arena.kv_LSPD.shape[1], dtype=torch.bool)
        empty_S[arena.null_slot] = False
        for slots in used:
            empty_S[slots] = False
        arena.kv_LSPD[:, empty_S] = float("nan")
        assert not arena.kv_LSPD[:, arena.null_slot].any(), "the null slot was written"

    poison()
    for index, prompt in enumerate(prompts()[:24]):
        llm.engine.add_request(str(index), prompt, greedy())
    last = run_all(llm, poison)
    outputs = expected.generate(prompts()[:24], greedy())
    assert [tokens(last[str(i)]) for i in range(24)] == [tokens(o) for o in outputs]
    if num_kv_slots is not None:
        assert llm.engine.stats.num_preemptions > 0
