"""Guards runs of one LLM that overlap: a step serves all of them, and each gets its own outputs, all and in order."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.engine.tools import alone, greedy, plain_llm, prompts, tokens
from tokenrouter import RequestOutput


def check_stream(outputs: list[RequestOutput], index: int) -> None:
    """Every token once, in order, the last output finished, and the text the sum of its pieces."""
    assert [len(o.outputs[0].token_ids) for o in outputs] == list(range(1, 13))
    assert [o.finished for o in outputs] == [False] * 11 + [True]
    assert tokens(outputs[-1]) == alone()[index]
    assert "".join(o.outputs[0].delta for o in outputs) == outputs[-1].outputs[0].text


@pytest.mark.parametrize("turns", ["ab", "aab", "aaaaab", "abbb"])
def test_streams_read_in_turns_both_end(turns: str) -> None:
    """A step that one stream asked for dropped the other's outputs; the other ended unfinished."""
    llm = plain_llm()
    streams = {"a": llm.stream([prompts()[3]], greedy()), "b": llm.stream([prompts()[4]], greedy())}
    seen: dict[str, list[RequestOutput]] = {"a": [], "b": []}
    for name in turns * 12:
        seen[name] += [output] if (output := next(streams[name], None)) else []
    for name in "ab":
        seen[name] += streams[name]
    check_stream(seen["a"], 3)
    check_stream(seen["b"], 4)
    assert not llm.engine.has_unfinished()


def begun(stream: Iterator[RequestOutput], count: int) -> list[RequestOutput]:
    return [next(stream) for _ in range(count)]


def test_generate_within_a_stream_leaves_it_whole() -> None:
    """``generate`` ran the stream's request to its end and threw its outputs away."""
    llm = plain_llm()
    stream = llm.stream([prompts()[3]], greedy())
    seen = begun(stream, 3)
    finals = llm.generate(prompts()[4:7], greedy(30))
    assert [tokens(final)[:12] for final in finals] == list(alone()[4:7])
    check_stream(seen + list(stream), 3)


def test_score_within_a_stream_leaves_it_whole() -> None:
    """``score`` drives the engine as ``generate`` does."""
    llm = plain_llm()
    ids = [*prompts()[5], *alone()[5]]

    def scored() -> Tensor:
        rows: list[Tensor] = []
        llm.score([ids], sink=lambda _, __, x_TV: rows.append(x_TV.clone()), prefill_len=4)
        return torch.cat(rows)

    expected = scored()
    stream = llm.stream([prompts()[3]], greedy())
    seen = begun(stream, 3)
    torch.testing.assert_close(scored(), expected, atol=1e-4, rtol=1e-4)
    check_stream(seen + list(stream), 3)


def test_a_stream_that_is_left_takes_only_its_own_requests_along() -> None:
    """Outputs of an abandoned run that are kept for ever, or its abort that ends a neighbour."""
    llm = plain_llm()
    left, kept = llm.stream(prompts()[5:8], greedy()), llm.stream([prompts()[3]], greedy())
    begun(left, 2)
    seen = begun(kept, 5)
    left.close()  # type: ignore[attr-defined]
    check_stream(seen + list(kept), 3)
    assert not llm.engine.has_unfinished() and not llm._inboxes
    assert llm.engine.pool.free == llm.engine.pool.num_slots


def test_a_refused_prompt_does_not_hide_what_others_steps_bring() -> None:
    """A stream paused at its refusal, before its first step, lost what a neighbour's steps brought it."""
    llm = plain_llm()
    stream = llm.stream(["", prompts()[3]], greedy())
    assert next(stream).error is not None
    llm.generate([prompts()[4]], greedy(30))
    check_stream(list(stream), 3)


def test_a_request_that_is_aborted_elsewhere_ends_its_stream() -> None:
    """A stream that waits for ever for an output that will not come."""
    llm = plain_llm()
    spoken, silent = llm.stream([prompts()[3]], greedy()), llm.stream([prompts()[4]], greedy())
    (first,), (second,) = begun(spoken, 1), begun(silent, 1)
    llm.engine.abort(first.request_id)
    llm.engine.abort(second.request_id, silent=True)
    assert [o.outputs[0].finish_reason for o in spoken][-1] == "abort"
    assert all(not o.finished for o in silent)
