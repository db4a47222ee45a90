"""Guards admission control: a full queue refuses, keeps nothing, and calls that bring many prompts never notice."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.tools import alone, greedy, plain_llm, prompts, run_all, tokens
from tokenrouter import LLM, EngineOptions, SamplingParams
from tokenrouter.engine import QueueFullError


def capped(most: int = 2, **options: Any) -> LLM:
    return plain_llm(EngineOptions(max_num_waiting=most, **{"max_num_seqs": 3, **options}))


def test_a_full_queue_refuses_and_keeps_nothing() -> None:
    """A request that is refused and runs all the same, or whose id stays in use."""
    llm = capped()
    for name in "ab":
        llm.engine.add_request(name, prompts()[3], greedy(3))
    for _ in range(2):
        with pytest.raises(
            QueueFullError, match=r"'c' is refused: 2 requests wait, and max_num_waiting is 2: add"
        ):
            llm.engine.add_request("c", prompts()[4], greedy(3))
    assert llm.engine.stats.num_rejected == 2 and len(llm.engine.scheduler.waiting) == 2
    llm.engine.step()
    llm.engine.add_request("c", prompts()[4], greedy(3))
    last = run_all(llm)
    assert {name: tokens(output) for name, output in last.items()} == {
        "a": alone()[3][:3],
        "b": alone()[3][:3],
        "c": alone()[4][:3],
    }
    llm.engine.stats.reset()
    assert llm.engine.stats.num_rejected == 0


def test_a_refusal_by_the_queue_is_a_value_error() -> None:
    """A caller that handles refused requests, and falls over this one."""
    assert issubclass(QueueFullError, ValueError)


def test_completions_of_one_request_come_in_together() -> None:
    """Half of a request's completions in the queue; a request of four that no queue of two ever takes."""
    llm = capped()
    params = SamplingParams(n=4, temperature=1.0, max_tokens=2, seed=1, ignore_eos=True)
    llm.engine.add_request("a", prompts()[3], params)
    assert len(llm.engine.scheduler.waiting) == 4
    with pytest.raises(QueueFullError):
        llm.engine.add_request("b", prompts()[3], params)
    assert len(run_all(llm)["a"].outputs) == 4


@pytest.mark.parametrize("most", [1, 2, 7])
def test_generate_feeds_as_room_appears(most: int) -> None:
    """The third prompt of a call refused, because the first two had not begun."""
    llm = capped(most)
    longest = 0
    step = llm.engine.step

    def watched() -> Any:
        nonlocal longest
        longest = max(longest, len(llm.engine.scheduler.waiting))
        return step()

    llm.engine.step = watched  # type: ignore[method-assign]
    outputs = llm.generate(prompts()[:12], greedy())
    assert tuple(map(tokens, outputs)) == alone()[:12]
    assert longest == most and llm.engine.stats.num_rejected == 0


def test_a_stream_yields_before_its_last_prompt_is_in() -> None:
    """All prompts fed first: the first token comes when almost everything is done."""
    llm = capped(1, max_num_seqs=1)
    stream = llm.stream(prompts()[:6], greedy())
    first = next(stream)
    assert len(first.outputs[0].token_ids) == 1
    assert len(llm.engine.scheduler.waiting) <= 1
    finals = [output for output in stream if output.finished]
    assert tuple(map(tokens, finals)) == alone()[:6]


def test_score_feeds_too() -> None:
    """A perplexity over more windows than may wait."""
    rows: dict[str, dict[int, list[Tensor]]] = {}
    for name, llm in (("capped", capped(1)), ("free", plain_llm())):
        rows[name] = {index: [] for index in range(5)}
        llm.score(prompts()[2:7], sink=lambda i, _, x_TV, to=name: rows[to][i].append(x_TV.clone()))
    for index in range(5):
        got, expected = (torch.cat(rows[name][index]) for name in ("capped", "free"))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_refusals_keep_their_meaning_behind_a_full_queue() -> None:
    """A bad prompt that comes to its turn late ends the call; or all are bad, and nobody says so."""
    llm = capped(1)
    given = [prompts()[3], "", prompts()[4], [], prompts()[5]]
    outputs = llm.generate(given, greedy())
    assert [output.error is None for output in outputs] == [True, False, True, False, True]
    assert [tokens(outputs[i]) for i in (0, 2, 4)] == list(alone()[3:6])
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.generate(["", []], greedy())
    assert not llm.engine.has_unfinished() and not llm._inboxes


def test_a_call_waits_for_room_that_others_take() -> None:
    """A queue filled by somebody else: generate trips over it, or spins without a step."""
    llm = capped(1, max_num_seqs=1)
    stream = llm.stream(prompts()[3:6], greedy())
    begun = [next(stream)]
    (output,) = llm.generate([prompts()[7]], greedy())
    assert tokens(output) == alone()[7]
    finals = [one for one in (*begun, *stream) if one.finished]
    assert tuple(map(tokens, finals)) == alone()[3:6]


def test_a_call_that_is_left_takes_back_what_it_had_not_fed() -> None:
    """Prompts that enter the engine after their caller has gone."""
    llm = capped(1, max_num_seqs=1)
    for _ in llm.stream(prompts()[3:9], greedy()):
        break
    assert not llm.engine.has_unfinished() and not llm._inboxes
    assert tokens(llm.generate([prompts()[5]], greedy())[0]) == alone()[5]


def test_prompts_arrive_with_the_call() -> None:
    """Timed from when there was room, a request that waited outside has no queue time."""
    llm = capped(1, max_num_seqs=1)
    arrivals: list[float] = []
    add = llm.engine.add_request

    def watched(*args: Any, arrival_s: float, **options: Any) -> None:
        arrivals.append(arrival_s)
        add(*args, arrival_s=arrival_s, **options)

    llm.engine.add_request = watched  # type: ignore[method-assign]
    outputs = llm.generate(prompts()[:4], greedy(3))
    assert len(arrivals) == 4 and len(set(arrivals)) == 1
    assert all(output.error is None for output in outputs)


def test_priorities_decide_who_of_a_call_runs_first() -> None:
    """Priorities that are taken and not handed on, or handed to other prompts."""
    llm = plain_llm(EngineOptions(scheduler="priority", max_num_seqs=1))
    stream = llm.stream(prompts()[3:7], greedy(2), priority=[3, 1, 2, -5])
    finals = [output for output in stream if output.finished]
    assert [tokens(output) for output in finals] == [alone()[i][:2] for i in (6, 4, 5, 3)]
    llm.engine.add_request("patient", prompts()[3], greedy(2), priority=1)
    llm.engine.add_request("urgent", prompts()[4], greedy(2), priority=0)
    assert next(iter(run_all(llm))) == "urgent"
    outputs = llm.generate(prompts()[3:5], greedy(2), priority=4)
    assert [tokens(output) for output in outputs] == [alone()[i][:2] for i in (3, 4)]


@pytest.mark.parametrize("priority", [1.5, True, "high", None])
def test_a_priority_is_an_integer(priority: Any) -> None:
    """A comparison that fails in the middle of a step."""
    llm = plain_llm(EngineOptions(scheduler="priority"))
    with pytest.raises(ValueError, match=f"priority must be an integer.*got {priority!r}"):
        llm.engine.add_request("a", [5], greedy(2), priority=priority)
    assert not llm.engine.has_unfinished()


def test_numbers_of_prompts_and_priorities_must_agree() -> None:
    """zip that stops at the shorter; an empty list taken for no list."""
    llm = plain_llm()
    with pytest.raises(ValueError, match="2 prompts but 3 priorities: give one, or one per prompt"):
        llm.generate(["a", "b"], greedy(), priority=[1, 2, 3])
    with pytest.raises(ValueError, match="2 prompts but 0 sampling params"):
        llm.generate(["a", "b"], [])
