"""Guards aborts in every state: slots come back at once, the others do not notice."""

from collections.abc import Callable

import pytest

from tests.engine.tools import alone, greedy, plain_llm, prompts, run_all, tiny, tokens, twin
from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.engine import LLMEngine
from tokenrouter.routers import RandomRouter
from tokenrouter.scheduler import Request


def requests_of(engine: LLMEngine) -> dict[str, Request]:
    return {r.request_id: r for r in (*engine.scheduler.running, *engine.scheduler.waiting)}


def is_waiting(engine: LLMEngine, request: Request) -> bool:
    return request in engine.scheduler.waiting and request.num_preemptions == 0


def in_prefill(engine: LLMEngine, request: Request) -> bool:
    return 0 < request.num_computed < request.prompt_len


def in_decode(engine: LLMEngine, request: Request) -> bool:
    return request.decoding and request.num_tokens > request.prompt_len + 2


def is_deferred(engine: LLMEngine, request: Request) -> bool:
    return request.waited_steps > 0


def is_preempted(engine: LLMEngine, request: Request) -> bool:
    return request in engine.scheduler.waiting and request.num_preemptions > 0


def in_recompute(engine: LLMEngine, request: Request) -> bool:
    return request.num_preemptions > 0 and 0 < request.num_computed < request.num_tokens - 1


@pytest.mark.parametrize("scheduler", ["fcfs", "static_batch"])
@pytest.mark.parametrize(
    "state", [is_waiting, in_prefill, in_decode, is_deferred, is_preempted, in_recompute]
)
def test_abort_in_every_state(state: Callable[[LLMEngine, Request], bool], scheduler: str) -> None:
    """Slots or rows that stay taken, a row that another request gets while it still runs, a lost neighbour."""
    llm = LLM(
        tiny(),
        router=RandomRouter(0.4),
        executors=twin(),
        options=EngineOptions(
            max_num_seqs=8,
            max_num_batched_tokens=24,
            num_kv_slots=110,
            dispatch="queued",
            max_wait_steps=3,
            scheduler=scheduler,  # type: ignore[arg-type]
        ),
    )
    expected = LLM(tiny(), router=RandomRouter(0.4), executors=twin()).generate(
        prompts()[:14], greedy()
    )
    for index, prompt in enumerate(prompts()[:14]):
        llm.engine.add_request(str(index), prompt, greedy())
    aborted: list[str] = []
    last = {}
    before: dict[str, tuple[int, ...]] = {}
    while llm.engine.has_unfinished():
        for output in llm.engine.step():
            last[output.request_id] = output
        llm.engine.pool.check_integrity()
        for name, request in requests_of(llm.engine).items():
            if len(aborted) < 3 and not request.finished and state(llm.engine, request):
                history = request.history
                before[name] = tuple(history.ids[request.prompt_len : len(history)].tolist())
                free = llm.engine.pool.free
                llm.engine.abort(name)
                aborted.append(name)
                assert name not in requests_of(llm.engine) or scheduler == "static_batch"
                assert llm.engine.pool.free >= free
                llm.engine.pool.check_integrity()
                break
    assert aborted, f"no request was ever {state.__name__}"
    assert llm.engine.pool.free == llm.engine.pool.num_slots
    assert llm.engine.pool.num_free_rows == 8
    for index, one in enumerate(expected):
        output = last[str(index)]
        assert output.finished
        if str(index) in aborted:
            assert output.outputs[0].finish_reason == "abort"
            assert output.outputs[0].token_ids == before[str(index)]
            assert len(output.outputs[0].routes) == len(output.prompt_token_ids) + len(
                before[str(index)]
            )
        else:
            assert tokens(output) == tokens(one), index


def test_abort_hands_back_what_was_generated() -> None:
    """A caller who gave up on a request wants its text so far, once."""
    llm = plain_llm()
    llm.engine.add_request("a", prompts()[3], greedy())
    llm.engine.add_request("b", prompts()[4], greedy())
    for _ in range(4):
        llm.engine.step()
    llm.engine.abort("a")
    llm.engine.abort("a")
    assert llm.engine.has_unfinished()
    (a, b) = llm.engine.step()
    assert (a.request_id, a.finished, a.outputs[0].finish_reason) == ("a", True, "abort")
    assert a.outputs[0].token_ids == alone()[3][:4]
    assert (b.request_id, b.finished) == ("b", False)
    assert tokens(run_all(llm)["b"]) == alone()[4]


def test_abort_of_the_last_request_still_hands_it_back() -> None:
    """``while has_unfinished(): step()`` ends without the output, or never ends."""
    llm = plain_llm()
    llm.engine.add_request("a", prompts()[3], greedy())
    llm.engine.abort("a")
    assert llm.engine.has_unfinished()
    (output,) = llm.engine.step()
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert not llm.engine.has_unfinished()
    assert llm.engine.step() == []


def test_silent_abort_hands_back_nothing() -> None:
    """What the library gave up on its own shows up in the next caller's results."""
    llm = plain_llm()
    llm.engine.add_request("a", prompts()[3], greedy())
    llm.engine.step()
    llm.engine.abort("a", silent=True)
    assert not llm.engine.has_unfinished()
    llm.engine.add_request("a", prompts()[3], greedy())
    assert tokens(run_all(llm)["a"]) == alone()[3]


def test_unknown_id_is_ignored() -> None:
    """A race between the last token and the abort that raises."""
    llm = plain_llm()
    llm.engine.abort("nobody")
    assert not llm.engine.has_unfinished()


def test_abort_of_several_completions() -> None:
    """Only the first completion of n is aborted; a finished one turns into an aborted one."""
    llm = plain_llm(EngineOptions(max_num_seqs=2))
    params = SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True)
    llm.engine.add_request("a", prompts()[3], params)
    for _ in range(5):
        llm.engine.step()
    llm.engine.abort("a")
    (output,) = llm.engine.step()
    assert output.finished
    assert [one.finish_reason for one in output.outputs] == ["length", "length", "abort"]
    assert llm.engine.pool.free == llm.engine.pool.num_slots


def test_an_aborted_stream_leaves_nothing_for_the_next_caller() -> None:
    """A consumer that breaks out of the loop: its requests run on, or their outputs come to the next stream."""
    llm = plain_llm()
    for output in llm.stream(list(prompts()[:3]), greedy()):
        assert not output.finished
        break
    assert not llm.engine.has_unfinished()
    assert llm.engine.pool.free == llm.engine.pool.num_slots
    seen = list(llm.stream([prompts()[5]], greedy()))
    assert len({output.request_id for output in seen}) == 1
    assert tokens(seen[-1]) == alone()[5]
    for output in llm.stream(["", prompts()[5]], greedy()):
        assert output.error is not None
        break
    assert not llm.engine.has_unfinished(), "left at a refused prompt, the others run on"
